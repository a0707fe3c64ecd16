"""Chat templates, rendered as transformers renders them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .._core import ModelError
from .sandbox import Renderer, TemplateError
from .tokenizer import Tokenizer, read_file, read_json

Message = Mapping[str, Any]
"""One turn of a conversation: ``role``, ``content`` and what else the template reads."""

MAX_SOURCE = 1 << 20
"""Characters of a template."""
SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


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
        self._where = where
        self._special_tokens = dict(special_tokens)
        if len(source) > MAX_SOURCE:
            raise ModelError(f"{where}: the chat template is longer than {MAX_SOURCE} characters")
        try:
            self._renderer = Renderer(source)
        except UnicodeEncodeError as error:  # lone surrogates, which JSON can write
            raise ModelError(f"{where}: the chat template is not valid text: {error}") from None
        except TemplateError as error:
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
        return self._render(
            {
                "messages": [dict(m) for m in messages],
                "tools": tools,
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
                **variables,
            }
        )

    def _render(self, variables: Mapping[str, Any]) -> str:
        try:
            return self._renderer.render(
                json.dumps({**self._special_tokens, **variables}, ensure_ascii=False)
            )
        except TemplateError as error:
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
