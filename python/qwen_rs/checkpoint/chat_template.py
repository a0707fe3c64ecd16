"""Chat templates, rendered as transformers renders them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser

from .._core import ModelError
from .sandbox import MAX_SOURCE, TemplateSandbox, bounded, render
from .tokenizer import Tokenizer, read_file, read_json

Message = Mapping[str, Any]
"""One turn of a conversation: ``role``, ``content`` and what else the template reads."""

# What rendering raises: jinja2's own errors, and those of operations on values that do not fit.
REFUSALS = (
    jinja2.TemplateError,
    ArithmeticError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)
SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


class _GenerationBlock(Extension):
    """``{% generation %}`` marks what the assistant wrote; when rendering a prompt it is plain text."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 wants an attribute of this type)

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller: Any) -> str:
        return str(caller())


class ChatTemplate:
    """A checkpoint's template: ``chat_template.jinja``, else the one in ``tokenizer_config.json``.

    It renders as transformers renders it, in a sandbox: a template gets the messages, and neither
    Python's attributes nor work without bound.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], where: str) -> None:
        """
        Raises:
            ModelError: the template does not parse.
        """
        environment = TemplateSandbox(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = bounded(tojson)
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._where = where
        self._special_tokens = dict(special_tokens)
        if len(source) > MAX_SOURCE:
            raise ModelError(f"{where}: the chat template is longer than {MAX_SOURCE} characters")
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError, MemoryError, SyntaxError, ValueError) as error:
            raise ModelError(f"{where}: the chat template does not parse: {error}") from None

    @classmethod
    def of(cls, directory: Path, tokenizer: Tokenizer) -> ChatTemplate | None:
        """The template of a checkpoint, or None if it has none."""
        special = {n: t for n in SPECIAL_TOKENS if (t := tokenizer.special_token(n)) is not None}
        path = directory / "chat_template.jinja"
        if path.exists():
            try:
                return cls(read_file(path).decode("utf-8"), special, str(path))
            except UnicodeDecodeError:
                raise ModelError(f"{path}: not valid UTF-8") from None
        path = directory / "chat_template.json"
        holder = read_json(path) if path.exists() else tokenizer.config
        source = holder.get("chat_template") if isinstance(holder, dict) else None
        if isinstance(source, list):  # several, by name
            named = {t.get("name"): t.get("template") for t in source if isinstance(t, dict)}
            source = named.get("default")
        if not isinstance(source, str):
            return None
        return cls(source, special, str(directory / "tokenizer_config.json"))

    def render(
        self,
        messages: Sequence[Message],
        *,
        enable_thinking: bool | None = None,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt for a conversation.

        Args:
            messages: the turns, oldest first.
            enable_thinking: the thinking switch; None leaves it to the template.
            add_generation_prompt: end with the beginning of the assistant's turn.
            tools: descriptions of functions that the model may call.
            variables: anything else that the template reads.

        Raises:
            ValueError: there are no messages, or the template refuses them.

        >>> source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        >>> template = ChatTemplate(source, {}, "it")
        >>> template.render([{"role": "user", "content": "Hello"}])
        '<user>Hello'
        >>> ChatTemplate("{{ ''.__class__ }}", {}, "it").render([{"role": "user", "content": "Hello"}])
        Traceback (most recent call last):
        ValueError: it: the chat template refuses the messages: attribute '__class__' of 'str' is unsafe
        """
        if not messages:
            raise ValueError("there are no messages")
        if enable_thinking is not None:
            variables["enable_thinking"] = enable_thinking
        try:
            return render(
                self._template,
                {
                    "messages": [dict(m) for m in messages],
                    "tools": tools,
                    "documents": None,
                    "add_generation_prompt": add_generation_prompt,
                    **self._special_tokens,
                    **variables,
                },
            )
        except REFUSALS as error:
            raise ValueError(f"{self._where}: the chat template refuses the messages: {error}") from None


def split_reasoning(text: str, *, opened: bool = False) -> tuple[str | None, str]:
    """Thinking and answer, apart: ``<think>...</think>`` is cut from the beginning.

    Args:
        text: what the model wrote.
        opened: the prompt ended inside ``<think>``.

    Returns:
        ``(reasoning or None, content)``. Thinking that was cut off before its end is all reasoning.

    >>> split_reasoning("<think>Is it?</think>Yes.")
    ('Is it?', 'Yes.')
    >>> split_reasoning("Is it", opened=True)
    ('Is it', '')
    """
    start = text.lstrip()
    if start.startswith("<think>"):
        start, opened = start[len("<think>") :], True
    if not opened:
        return None, text
    reasoning, _, content = start.partition("</think>")
    return reasoning.strip("\n"), content.lstrip("\n")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)
