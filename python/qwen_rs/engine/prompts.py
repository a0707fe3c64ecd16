"""What counts as a prompt.

A prompt is text, or token ids: a list, a tuple, a range or a NumPy array of whole numbers. Anything
else, bytes and dictionaries among it, is a ValueError.
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any, TypeGuard

import numpy as np

from .arguments import shown, whole

Prompt = str | Sequence[int]


def as_list(prompts: Any) -> tuple[list[Any], bool]:
    """Prompts as a list, and whether it was one prompt.

    An empty list holds no prompts; an empty array of whole numbers is a prompt, an empty one.

    Raises:
        ValueError: it is neither a prompt nor a list of them.
    """
    if isinstance(prompts, str):
        return [prompts], True
    if not _is_sequence(prompts):
        raise ValueError(
            f"a prompt is text or a list of token ids, and prompts are a list of these, not {_kind(prompts)}"
        )
    if isinstance(prompts, np.ndarray) and prompts.ndim == 1 and prompts.dtype.kind in "biuf":
        return [prompts], True
    items = list(prompts)
    if items and isinstance(items[0], numbers.Number | np.bool_):
        return [items], True
    return items, False


def token_ids(prompt: Any, vocab_size: int) -> list[int]:
    """The ids of a prompt that is not text.

    Raises:
        ValueError: it is no list of token ids, or one is outside the vocabulary.
    """
    if not _is_sequence(prompt):
        raise ValueError(f"a prompt is text or a list of token ids, not {_kind(prompt)}")
    ids = [whole("a token id", value, 0) for value in prompt]
    check_ids(ids, vocab_size)
    return ids


def check_ids(ids: Sequence[int], vocab_size: int) -> None:
    """
    Raises:
        ValueError: an id is outside the vocabulary.
    """
    for token in ids:
        if not 0 <= token < vocab_size:
            raise ValueError(f"token id {token} is outside the vocabulary of {vocab_size}")


def _is_sequence(value: Any) -> TypeGuard[Sequence[Any] | np.ndarray[Any, Any]]:
    if isinstance(value, np.ndarray):
        return value.ndim > 0
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview)


def _kind(value: Any) -> str:
    return f"{type(value).__name__}: {shown(value)}"
