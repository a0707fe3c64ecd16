"""How to choose tokens and when to stop."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .._core import ModelError
from .arguments import checked_keywords

DEFAULT_MAX_TOKENS = 256


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Settings of one generation. ``None``: as the checkpoint's ``generation_config.json`` says.

    Attributes:
        max_tokens: the most tokens to generate, at least 1.
        temperature: 0 is greedy (the likeliest token).
        top_k: sample from the k likeliest tokens; 0: all.
        top_p: sample from the fewest tokens whose probabilities reach p, above 0 to 1.
        min_p: leave out tokens less probable than min_p x the likeliest, 0 to 1.
        repetition_penalty: logits of tokens seen before are divided by it if positive, else
            multiplied; 1: none.
        presence_penalty: taken from the logits of tokens generated before, -2 to 2.
        frequency_penalty: taken once for each time that a token was generated, -2 to 2.
        seed: the same seed gives the same tokens; None: a fresh one is drawn.
        stop: strings that end the text; they are not part of it.
        ignore_eos: go on past end-of-sequence tokens.
        logprobs: with each token give its log probability and those of so many of the likeliest
            tokens (before temperature, filters and penalties); None: none.

    Raises:
        ValueError: a setting is out of its range.

    Sources: top-p is nucleus sampling (Holtzman et al. 2019), min-p is of Nguyen et al. 2024, the
    repetition penalty of Keskar et al. 2019 (CTRL).

    >>> SamplingParams(stop="END").stop_strings
    ('END',)
    >>> SamplingParams(top_p=1.5)
    Traceback (most recent call last):
    ValueError: top_p must be above 0 and at most 1, not 1.5
    >>> SamplingParams(temprature=1)
    Traceback (most recent call last):
    TypeError: SamplingParams: no argument 'temprature'; did you mean 'temperature'?
    """

    max_tokens: int = DEFAULT_MAX_TOKENS
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        _check_whole("max_tokens", self.max_tokens, 1)
        _check_whole("top_k", self.top_k, 0)
        _check_whole("seed", self.seed, 0)
        _check_whole("logprobs", self.logprobs, 0)
        if self.seed is not None and self.seed >= 2**64:
            raise ValueError(f"seed must be below 2**64, not {self.seed}")
        _check("temperature", self.temperature, "0 or more", lambda x: 0 <= x < float("inf"))
        _check("top_p", self.top_p, "above 0 and at most 1", lambda x: 0 < x <= 1)
        _check("min_p", self.min_p, "0 to 1", lambda x: 0 <= x <= 1)
        _check("repetition_penalty", self.repetition_penalty, "above 0", lambda x: 0 < x < float("inf"))
        _check("presence_penalty", self.presence_penalty, "-2 to 2", lambda x: -2 <= x <= 2)
        _check("frequency_penalty", self.frequency_penalty, "-2 to 2", lambda x: -2 <= x <= 2)
        if not all(isinstance(s, str) and s for s in self.stop_strings):
            raise ValueError(f"stop strings must be strings that are not empty, not {self.stop!r}")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """``stop`` as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def resolved(self, generation_config: Mapping[str, Any]) -> SamplingParams:
        """The same, with every ``None`` filled from a ``generation_config.json`` and a seed drawn.

        Raises:
            ModelError: a value of the file cannot be used.
        """
        sampling = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        asked = any(getattr(self, n) is not None for n in sampling[:4])
        neutral = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
        found = {n: generation_config[n] for n in sampling if generation_config.get(n) is not None}
        if not generation_config.get("do_sample", False) and not asked:
            found["temperature"] = 0.0
        chosen = {n: v for n in sampling if (v := getattr(self, n)) is not None}
        try:
            from_checkpoint = SamplingParams(**{**neutral, **found})
        except (ValueError, TypeError) as error:
            raise ModelError(f"generation_config.json: {error}") from None
        filled = {n: getattr(from_checkpoint, n) for n in sampling} | chosen
        seed = secrets.randbits(32) if self.seed is None else self.seed
        return replace(self, **filled, seed=seed)


def _check(name: str, value: float | None, allowed: str, test: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not test(value):
        raise ValueError(f"{name} must be {allowed}, not {value!r}")


def _check_whole(name: str, value: int | None, least: int) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, not {value!r}")


SamplingParams.__init__ = checked_keywords(SamplingParams.__init__)  # type: ignore[method-assign]
