"""Unknown keyword arguments are errors that name the nearest right one."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable
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
