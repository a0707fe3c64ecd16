"""How to choose tokens and when to stop."""

from __future__ import annotations

import hashlib
import math
import secrets
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .._core import ModelError
from .arguments import checked_keywords, real, shown, whole

DEFAULT_MAX_TOKENS = 256
# What a number may be, and the test for it.
REALS: dict[str, tuple[str, Callable[[float], bool]]] = {
    "temperature": ("0 or more", lambda x: 0 <= x < math.inf),
    "top_p": ("above 0 and at most 1", lambda x: 0 < x <= 1),
    "min_p": ("0 to 1", lambda x: 0 <= x <= 1),
    "repetition_penalty": ("above 0", lambda x: 0 < x < math.inf),
    "presence_penalty": ("-2 to 2", lambda x: -2 <= x <= 2),
    "frequency_penalty": ("-2 to 2", lambda x: -2 <= x <= 2),
}
# The least that a whole number may be, and the power of two that it is below.
WHOLES = {"max_tokens": (1, 63), "top_k": (-1, 63), "seed": (0, 64), "logprobs": (0, 63), "n": (1, 63)}
NEUTRAL: dict[str, float] = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
"""What ``generation_config.json`` may set, and what it is where neither it nor the caller says."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Settings of one generation; ``None`` is the default of each.

    The default of ``temperature``, ``top_k``, ``top_p``, ``min_p`` and ``repetition_penalty`` is what the
    checkpoint's ``generation_config.json`` says.

    Attributes:
        max_tokens: the most tokens to generate, at least 1; None: until the context is full.
        temperature: 0 is greedy (the likeliest token).
        top_k: sample from the k likeliest tokens; 0 or -1: all.
        top_p: sample from the fewest tokens whose probabilities reach p, above 0 to 1.
        min_p: leave out tokens less probable than min_p x the likeliest, 0 to 1.
        repetition_penalty: logits of tokens seen before are divided by it if positive, else
            multiplied; 1: none.
        presence_penalty: taken from the logits of tokens generated before, -2 to 2.
        frequency_penalty: taken once for each time that a token was generated, -2 to 2.
        n: choices to generate for a prompt. Each draws for itself.
        seed: the same seed gives the same tokens for a prompt, alone or in a list; of n choices the
            first has this seed, each other the one of :func:`choice_seed`. None: each sequence draws a
            fresh one. The seed that a sequence used is in its metrics.
        stop: a string or several that end the text; they are not part of it. Special tokens, which are
            no part of the text either, may be written out in them (``"<|im_end|>"``).
        stop_token_ids: tokens that end the text; theirs is not part of it.
        ignore_eos: go on past end-of-sequence tokens.
        logprobs: with each token give its log probability and those of so many of the likeliest
            tokens (before temperature, filters and penalties); None: none.
        logit_bias: what is added to the logits of tokens, by token id, -100 to 100; before everything else.

    Raises:
        ValueError: a setting is out of its range.

    Sources: top-p is nucleus sampling (Holtzman et al. 2019), min-p is of Nguyen et al. 2024, the
    repetition penalty of Keskar et al. 2019 (CTRL).

    >>> SamplingParams(stop="END").stop
    ('END',)
    >>> SamplingParams(top_p=1.5)
    Traceback (most recent call last):
    ValueError: top_p must be above 0 and at most 1, not 1.5
    >>> SamplingParams(temprature=1)
    Traceback (most recent call last):
    TypeError: SamplingParams: no argument 'temprature'; did you mean 'temperature'?
    """

    max_tokens: int | None = DEFAULT_MAX_TOKENS
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = 0.0
    frequency_penalty: float | None = 0.0
    n: int | None = 1
    seed: int | None = None
    stop: str | Iterable[str] | None = ()
    stop_token_ids: Iterable[int] | None = ()
    ignore_eos: bool | None = False
    logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None

    def __post_init__(self) -> None:
        checked: dict[str, object] = {
            name: _number(name, value)
            for name in (*REALS, *WHOLES)
            if (value := getattr(self, name)) is not None
        }
        defaults = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "n": 1}
        checked |= {name: value for name, value in defaults.items() if name not in checked}
        checked["stop"] = _stop(self.stop)
        checked["logit_bias"] = _logit_bias(self.logit_bias)
        checked["stop_token_ids"] = _stop_token_ids(self.stop_token_ids)
        checked["ignore_eos"] = False if self.ignore_eos is None else _switch("ignore_eos", self.ignore_eos)
        for name, value in checked.items():
            object.__setattr__(self, name, value)  # once, before anyone has seen it

    def resolved(
        self,
        generation_config: Mapping[str, Any],
        where: str = "generation_config.json",
        *,
        choice: int = 0,
    ) -> SamplingParams:
        """The settings of one sequence: every ``None`` is filled in, a seed is drawn, ``n`` is 1.

        Args:
            generation_config: what the checkpoint says; only values that are used are judged.
            where: its path, for messages.
            choice: which of ``n``.

        Raises:
            ModelError: a value of ``generation_config`` that is used is out of its range.
        """
        try:
            filled = self._filled(generation_config)
        except ValueError as error:
            raise ModelError(f"{where}: {error}") from None
        seed = secrets.randbits(32) if self.seed is None else choice_seed(self.seed, choice)
        return replace(self, **filled, seed=seed, n=1)

    def _filled(self, config: Mapping[str, Any]) -> dict[str, Any]:
        own = {name: value for name in NEUTRAL if (value := getattr(self, name)) is not None}
        sampling = own.keys() - {"repetition_penalty"}  # to ask for any of these is to ask for sampling
        if not sampling and not _switch("do_sample", config.get("do_sample") or False):
            own["temperature"] = 0.0
        found: dict[str, Any] = {}
        for name, neutral in NEUTRAL.items():  # the temperature first
            unused = found.get("temperature") == 0 and name != "repetition_penalty"
            value = None if unused else config.get(name)
            found[name] = own[name] if name in own else neutral if value is None else _number(name, value)
        return found


def choice_seed(seed: int, choice: int) -> int:
    """The seed of one of n choices, counted from 0: that of the first is ``seed`` itself.

    Of the others it is the first 8 bytes, little-endian, of the SHA-256 of both numbers as 8 bytes,
    little-endian, each.

    >>> choice_seed(7, 0), choice_seed(7, 1)
    (7, 8875243823434874480)
    """
    if choice == 0:
        return seed
    return int.from_bytes(hashlib.sha256(struct.pack("<QQ", seed, choice)).digest()[:8], "little")


def _number(name: str, value: object) -> float:
    if name in REALS:
        return real(name, value, *REALS[name])
    number = whole(name, value, *WHOLES[name])
    return 0 if name == "top_k" and number == -1 else number  # vLLM's and transformers' spellings of off


def _switch(name: str, value: object) -> bool:
    if isinstance(value, bool | np.bool_):
        return bool(value)
    raise ValueError(f"{name} must be true or false, not {shown(value)}")


def _items(value: object) -> list[Any] | None:
    """What an iterable gives; None for text, bytes, a mapping and what is none."""
    if isinstance(value, str | bytes | bytearray | Mapping) or not isinstance(value, Iterable):
        return None
    return list(value)


def _stop(value: object) -> tuple[str, ...]:
    items = [] if value is None else [value] if isinstance(value, str) else _items(value)
    if items is None or not all(isinstance(s, str) and s for s in items):
        raise ValueError(f"stop must be a string or several, none of them empty, not {shown(value)}")
    return tuple(map(str, items))


def _logit_bias(value: object) -> Mapping[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise ValueError(f"logit_bias must be a mapping of token ids to numbers, not {shown(value)}")
    allowed: tuple[str, Callable[[float], bool]] = ("-100 to 100", lambda x: -100 <= x <= 100)
    return {
        whole("logit_bias: a token id", token, 0): real("logit_bias", bias, *allowed)
        for token, bias in value.items()
    }


def _stop_token_ids(value: object) -> tuple[int, ...]:
    items = [] if value is None else _items(value)
    if items is None:
        raise ValueError(f"stop_token_ids must be a list of token ids, not {shown(value)}")
    return tuple(whole("stop_token_ids: a token id", item, 0) for item in items)


SamplingParams.__init__ = checked_keywords(SamplingParams.__init__)  # type: ignore[method-assign]
