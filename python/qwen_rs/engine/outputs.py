"""What a generation gives: whole outputs, and pieces as they stream."""

from __future__ import annotations

from dataclasses import dataclass

from .metrics import Metrics


@dataclass(frozen=True, kw_only=True)
class Output:
    """A finished generation.

    Attributes:
        text: the text, without stop strings, stop tokens and end-of-sequence tokens.
        token_ids: the tokens generated, those included that ended the sequence: one, or all that a stop
            string took, and what was generated while a longer or earlier one could still come.
        finish_reason: ``stop`` (an end-of-sequence token, a stop token or a stop string) or ``length``.
        stop_reason: the token id or the string that ended it, None for ``length``.
        prompt_token_ids: the tokens of the prompt.
        logprobs: for each token the log probabilities (nats) of it and the likeliest, by token id; None
            unless ``SamplingParams.logprobs`` asks for them.
        metrics: what it took.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: int | str | None
    prompt_token_ids: list[int]
    logprobs: list[dict[int, float]] | None
    metrics: Metrics


@dataclass(frozen=True, kw_only=True)
class ChatOutput(Output):
    """A finished answer.

    Attributes:
        content: the answer.
        reasoning: the thinking before it, or None. With ``finish_reason`` ``length`` and an empty
            answer, thinking took all of ``max_tokens``.
    """

    content: str
    reasoning: str | None


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A piece of streamed text.

    Attributes:
        text: whole characters; never a part of a stop string.
        token_ids: the tokens generated since the last piece. The text of a token may come with a
            later piece.
        finish_reason: with the last piece ``stop`` or ``length``, before that None.
    """

    text: str
    token_ids: list[int]
    finish_reason: str | None = None
