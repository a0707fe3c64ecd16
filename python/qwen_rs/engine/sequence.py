"""One sequence that is being generated: its tokens, its text, and when it ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .._core import Cache, Sampler
from ..checkpoint.tokenizer import StreamDecoder, Tokenizer
from .outputs import Piece
from .sampling_params import SamplingParams
from .stop_strings import StopStrings


def log_probabilities(logits: NDArray[np.float32], token: int, count: int) -> dict[int, float]:
    """Natural log probabilities of ``token`` and of the ``count`` likeliest, likeliest first."""
    x = logits.astype(np.float64)
    x -= x.max()
    x -= np.log(np.exp(x).sum())
    count = min(count, len(x))
    top = np.argpartition(-x, count - 1)[:count] if count else np.array([], dtype=np.int64)
    chosen = {int(i) for i in top} | {token}
    return {i: float(x[i]) for i in sorted(chosen, key=lambda i: (-x[i], i))}


@dataclass
class SequenceState:
    """A sequence between its prefill and its end."""

    prompt_ids: Sequence[int]
    params: SamplingParams
    tokenizer: Tokenizer
    end_ids: frozenset[int]
    max_context: int
    cache: Cache
    token_ids: list[int] = field(default_factory=list)
    forward_ms: list[float] = field(default_factory=list)
    logprobs: list[dict[int, float]] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cached_tokens: int = 0

    def __post_init__(self) -> None:
        p = self.params
        assert p.temperature is not None and p.top_k is not None and p.top_p is not None  # resolved
        assert p.min_p is not None and p.repetition_penalty is not None and p.seed is not None
        assert p.presence_penalty is not None and p.frequency_penalty is not None
        self._sampler = Sampler(
            temperature=p.temperature,
            top_k=p.top_k,
            top_p=p.top_p,
            min_p=p.min_p,
            repetition_penalty=p.repetition_penalty,
            presence_penalty=p.presence_penalty,
            frequency_penalty=p.frequency_penalty,
            seed=p.seed,
            prompt=self.prompt_ids if p.repetition_penalty != 1 else (),
        )
        self._decoder = StreamDecoder(self.tokenizer)
        self._stops = StopStrings(tuple(p.stop or ()), self.tokenizer.special_tokens.values())
        # End-of-sequence tokens and stop tokens end the text alike.
        self._ends = frozenset(p.stop_token_ids or ()) | (frozenset() if p.ignore_eos else self.end_ids)
        room = self.max_context - len(self.prompt_ids)
        self._most = room if p.max_tokens is None else min(p.max_tokens, room)
        self._told = 0

    def take(self, logits: NDArray[np.float32], milliseconds: float) -> str:
        """Chooses the next token from ``[vocab]`` logits; returns the text that it sets free."""
        self.forward_ms.append(milliseconds)
        token = self._sampler.sample(logits)
        self.token_ids.append(token)
        if self.params.logprobs is not None:
            self.logprobs.append(log_probabilities(logits, token, self.params.logprobs))
        if token in self._ends:
            return self._end("stop", token, "")
        special = self.tokenizer.special_tokens.get(token, "")
        text, stop = self._stops.push(self._decoder.push(token), special)
        if stop is not None:
            return self._end("stop", stop, text, flush=False)
        if len(self.token_ids) >= self._most:
            return self._end("length", None, text)
        self.text += text
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
        self.finish_reason, self.stop_reason = reason, cause
        self.text += text
        return text

    def piece(self, text: str) -> Piece:
        """``text`` with the tokens that no piece has told of."""
        new, self._told = self.token_ids[self._told :], len(self.token_ids)
        return Piece(text=text, token_ids=new, finish_reason=self.finish_reason)
