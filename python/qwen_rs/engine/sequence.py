"""One sequence that is being generated: its tokens, its text, and when it ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from .._core import Event
from ..checkpoint.tokenizer import StreamDecoder, Tokenizer
from .outputs import Piece
from .sampling_params import SamplingParams
from .stop_strings import StopStrings


class Constraint(Protocol):
    """Which tokens may come next."""

    def allowed(self, token_ids: Sequence[int]) -> bytes:
        """A bit for each token, the lowest of a byte first, after the tokens generated so far."""


@dataclass
class SequenceState:
    """A sequence between its submission and its end."""

    prompt_ids: Sequence[int]
    params: SamplingParams
    tokenizer: Tokenizer
    end_ids: frozenset[int]
    max_context: int
    salt: str = ""
    priority: int = 0
    prompt_logprobs_wanted: int | None = None
    constraint: Constraint | None = None
    id: int = -1
    token_ids: list[int] = field(default_factory=list)
    forward_ms: list[float] = field(default_factory=list)
    logprobs: list[dict[int, float]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, float]] | None = None
    text: str = ""
    texts: deque[str] = field(default_factory=deque)
    """What each token has set free, until it is taken."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: BaseException | None = None
    cached_tokens: int = 0
    kv_bytes: int = 0
    news: bool = False

    def __post_init__(self) -> None:
        p = self.params
        self._decoder = StreamDecoder(self.tokenizer)
        self._stops = StopStrings(tuple(p.stop or ()), self.tokenizer.special_tokens.values())
        # End-of-sequence tokens and stop tokens end the text alike.
        self._ends = frozenset(p.stop_token_ids or ()) | (frozenset() if p.ignore_eos else self.end_ids)
        room = self.max_context - len(self.prompt_ids)
        self._most = room if p.max_tokens is None else min(p.max_tokens, room)
        self._told = 0
        self._ending: tuple[str, int | str | None] | None = None

    def settings(self) -> dict[str, Any]:
        """What the engine is told beside the prompt."""
        p = self.params
        return {
            "max_tokens": self._most,
            "temperature": p.temperature,
            "top_k": p.top_k,
            "top_p": p.top_p,
            "min_p": p.min_p,
            "repetition_penalty": p.repetition_penalty,
            "presence_penalty": p.presence_penalty,
            "frequency_penalty": p.frequency_penalty,
            "seed": p.seed,
            "logit_bias": list((p.logit_bias or {}).items()),
            "end_ids": sorted(self._ends),
            "logprobs": p.logprobs,
            "prompt_logprobs": self.prompt_logprobs_wanted,
            "salt": self.salt,
            "priority": self.priority,
            "constrained": self.constraint is not None,
        }

    def take(self, event: Event) -> None:
        """What a step has given."""
        if event.error is not None:
            self.fail(event.error)
            return
        if event.prompt_logprobs is not None:
            self.prompt_logprobs = [dict(row) for row in event.prompt_logprobs]
        token = event.token
        if token is None:
            return
        self.forward_ms.append(event.milliseconds)
        self.cached_tokens, self.kv_bytes = event.cached_tokens, event.kv_bytes
        self.token_ids.append(token)
        if self.params.logprobs is not None:
            self.logprobs.append(dict(event.logprobs))
        text = self._text_of(token)
        self.text += text
        self.texts.append(text)
        if self._ending is not None:  # last of all: who waits for the end reads what is there then
            reason, self.stop_reason = self._ending
            self.finish_reason = reason

    def fail(self, error: BaseException) -> None:
        """Ends it with an error."""
        self.error, self.finish_reason = error, "error"

    def _text_of(self, token: int) -> str:
        if token in self._ends:
            return self._end("stop", token, "")
        special = self.tokenizer.special_tokens.get(token, "")
        text, stop = self._stops.push(self._decoder.push(token), special)
        if stop is not None:
            return self._end("stop", stop, text, flush=False)
        if len(self.token_ids) >= self._most:
            return self._end("length", None, text)
        return text

    def _end(self, reason: str, cause: int | str | None, text: str, *, flush: bool = True) -> str:
        if flush:
            last, stop = self._stops.push(self._decoder.flush())
            text += last
            if stop is None:
                last, stop = self._stops.flush()
                text += last
            if stop is not None:
                reason, cause = "stop", stop
        self._ending = reason, cause
        return text

    def pieces(self) -> list[Piece]:
        """What no piece has told of: a piece for each token that set text free, and for the last."""
        pieces = []
        texts, first = list(self.texts), len(self.token_ids) - len(self.texts)  # a text for each token
        self.texts.clear()
        for at, text in enumerate(texts, first + 1):
            last = at == len(self.token_ids) and self.finish_reason is not None and self.error is None
            if text or last:
                new, self._told = self.token_ids[self._told : at], at
                reason = self.finish_reason if last else None
                pieces.append(Piece(text=text, token_ids=new, finish_reason=reason))
        return pieces
