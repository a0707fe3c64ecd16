"""Arguments, checked: every error names the argument and what it may be."""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
import numbers
import operator
import struct
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def checked_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, with a better TypeError for a keyword that it does not take."""
    names = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in names:
                near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise TypeError(
                    f"{function.__qualname__.removesuffix('.__init__')}: no argument {name!r}{hint}"
                )
        return function(*args, **kwargs)

    return wrapper


def whole(name: str, value: object, least: int, bits: int = 63) -> int:
    """``value`` as a whole number, numpy's too, from ``least`` to below 2**bits.

    Raises:
        ValueError: it is none, with ``name``.
    """
    try:
        number = operator.index(value)  # type: ignore[arg-type] # what has no __index__ is a TypeError
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or number < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, not {shown(value)}")
    if number >= 2**bits:
        raise ValueError(f"{name} must be below 2**{bits}")
    return number


def real(name: str, value: object, allowed: str, test: Callable[[float], bool]) -> float:
    """``value`` as a float, numpy's too, if what the core's f32 makes of it passes the test.

    Raises:
        ValueError: it does not, with ``name`` and what is ``allowed``.
    """
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):  # larger than any float
            number = float(value)
            (single,) = struct.unpack("f", struct.pack("f", number))
            if test(single):
                return number
    raise ValueError(f"{name} must be {allowed}, not {shown(value)}")


def one_of(name: str, value: object, choices: Sequence[str]) -> str:
    """``value``, if it is one of the choices.

    Raises:
        ValueError: it is not, with ``name`` and the choices.
    """
    if isinstance(value, str) and value in choices:
        return value
    raise ValueError(f"{name} must be {', '.join(choices[:-1])} or {choices[-1]}, not {shown(value)}")


def shown(value: object) -> str:
    """``value`` for a message of one line."""
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # an int of more than 4,300 digits
        return "a number that long"
    return text if len(text) <= 80 else f"{text[:80]}..."
