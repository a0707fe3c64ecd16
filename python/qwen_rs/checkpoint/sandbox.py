"""The sandbox that chat templates run in.

A template comes with a checkpoint, from anyone. It gets the messages and nothing else: reaching for
the attributes of Python objects is refused, and so is work without bound. Loops and calls are counted,
and no string or list grows beyond a limit.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_SOURCE = 1 << 20
"""Characters of a template."""
MAX_STEPS = 250_000
"""Turns of loops and calls in one rendering: a conversation of a thousand messages takes some ten
thousand."""
MAX_SIZE = 8 << 20
"""Characters of a string, items of a list: far more than any context holds."""
MAX_BITS = 4096
"""Of a whole number."""
# Their widths make strings of any length from nothing.
_PADDING = frozenset(["center", "expandtabs", "format", "format_map", "ljust", "rjust", "zfill"])
_WIDTHS = frozenset(["batch", "center", "indent", "slice", "tojson", "wordwrap"])
MAX_WIDTH = 100
"""What these filters may be given."""
_WIDE = re.compile(r"%[^a-zA-Z%]*(\d{6}|\*)")

_steps: ContextVar[list[int]] = ContextVar("_steps")


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """jinja2's sandbox, with bounds."""

    intercepted_binops = frozenset(["*", "**", "%", "+"])

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.filters = {name: bounded(function) for name, function in self.filters.items()}
        self.filters["_counted"] = _counted
        self.filters["_sized"] = _sized

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        _Bounds().visit(template)  # in place
        template.set_environment(self)
        return template

    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        """Refuses at once: an undefined value would be taken for false."""
        raise SecurityError(f"attribute {attribute!r} of {type(obj).__name__!r} is unsafe")

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return not (isinstance(obj, str) and attr in _PADDING) and super().is_safe_attribute(obj, attr, value)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        _count()
        if isinstance(owner := getattr(obj, "__self__", None), str):
            _check_growth(getattr(obj, "__name__", ""), [owner, *args, *kwargs.values()])
        return _sized(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _check_operands(operator, left, right)
        return super().call_binop(context, operator, left, right)


def render(template: jinja2.Template, variables: dict[str, Any]) -> str:
    """The text of a template of a :class:`TemplateSandbox`.

    Raises:
        SecurityError: the template takes too many steps or makes too long a text.
    """
    token = _steps.set([MAX_STEPS])
    try:
        parts, size = [], 0
        for part in template.generate(variables):
            size += len(part)
            if size > MAX_SIZE:
                raise SecurityError(f"its text is longer than {MAX_SIZE} characters")
            parts.append(part)
        return "".join(parts)
    finally:
        _steps.reset(token)


class _Bounds(NodeTransformer):
    """Counts the turns of every loop, and measures what ``~`` joins."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, "_counted", [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        return nodes.Filter(node, "_sized", [], [], None, None, lineno=node.lineno)


def _count() -> None:
    left = _steps.get()
    left[0] -= 1
    if left[0] < 0:
        raise SecurityError(f"it takes more than {MAX_STEPS} steps")


# With the context it cannot be called when a template is compiled, where nothing is counted.
@jinja2.pass_context
def _counted(context: Context, values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        _count()
        yield value


def _sized(value: Any) -> Any:
    if isinstance(value, (str, list, tuple)) and len(value) > MAX_SIZE:
        raise SecurityError(f"it makes a value of more than {MAX_SIZE} characters or items")
    return value


def bounded(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose result is bounded, before it is made; how it is called stays as it is."""
    name = function.__name__.removeprefix("do_")

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        values = [v for v in (*args, *kwargs.values()) if isinstance(v, (str, int, list, tuple))]
        if name in _WIDTHS and any(isinstance(v, int) and v > MAX_WIDTH for v in values):
            raise SecurityError(f"{name} is given too large a number")
        _check_growth(name, values)
        return _sized(function(*args, **kwargs))

    return call


def _check_growth(name: str, values: list[Any]) -> None:
    """Refuses a filter or a method of strings whose text would be too long."""
    texts = [v for v in values if isinstance(v, str)]
    size = 0
    if name == "replace" and len(texts) == 3:
        text, old, new = texts
        size = len(text) + text.count(old) * len(new)
    elif name == "join":
        between = len(texts[0]) if texts else 0
        for parts in (v for v in values if isinstance(v, (list, tuple))):
            size += between * len(parts) + sum(len(p) for p in parts if isinstance(p, str))
    elif name == "indent" and texts:
        size = len(texts[0]) + (texts[0].count("\n") + 1) * MAX_WIDTH
    elif name == "format" and texts and _WIDE.search(texts[0]):
        size = MAX_SIZE + 1
    if size > MAX_SIZE:
        raise SecurityError(f"the result of {name} is too large")


def _check_operands(operator: str, left: Any, right: Any) -> None:
    def size(value: Any) -> int:
        return len(value) if isinstance(value, (str, list, tuple)) else 0

    def bits(value: Any) -> int:
        return value.bit_length() if isinstance(value, int) else 0

    if operator == "+":
        refused = size(left) + size(right) > MAX_SIZE
    elif operator == "%":
        refused = isinstance(left, str) and _WIDE.search(left) is not None
    elif operator == "**":
        refused = bits(left) * (right if isinstance(right, int) else 1) > MAX_BITS
    else:
        times = max(right if isinstance(right, int) else 1, left if isinstance(left, int) else 1)
        refused = max(size(left), size(right)) * times > MAX_SIZE or bits(left) + bits(right) > MAX_BITS
    if refused:
        raise SecurityError(f"the result of {operator!r} is too large")
