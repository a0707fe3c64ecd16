"""Chat templates, rendered as transformers renders them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._core import ModelError
from .control_tokens import change_strings, typed_places
from .reasoning import TAGS
from .sandbox import Renderer, TemplateError
from .tokenizer import Tokenizer, check_text, read_file, read_json

Message = Mapping[str, Any]
"""One turn of a conversation: ``role``, ``content`` and what else the template reads."""

MAX_SOURCE = 1 << 20
"""Characters of a template."""
SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


@dataclass(frozen=True, kw_only=True)
class ChatPrompt:
    """A conversation, ready to be answered.

    Attributes:
        text: the prompt, as the template renders it.
        token_ids: its tokens; only what the template itself writes becomes control tokens.
        thinking: it ends inside ``<think>``, so that the answer begins with thinking.
    """

    text: str
    token_ids: list[int]
    thinking: bool


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
        self._where, self._source = where, source
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
        return self._render(
            self._variables(
                messages,
                enable_thinking=enable_thinking,
                add_generation_prompt=add_generation_prompt,
                tools=tools,
                **variables,
            )
        )

    def prompt(self, messages: Sequence[Message], tokenizer: Tokenizer, **options: Any) -> ChatPrompt:
        """The prompt for a conversation in tokens.

        Text of the messages, names and tools is ordinary text: where it spells out ``<|im_end|>`` or
        another control token, it does not become that token. Only tags that are not special tokens, such
        as ``<think>``, still do in an assistant's message.

        Args:
            messages: the turns, oldest first.
            tokenizer: the checkpoint's.
            options: as for ``render``.

        Raises:
            as ``render``.
        """
        special, tags = tokenizer.control_tokens
        variables = self._variables(messages, **options)
        text, places = typed_places(self._render, variables, self._source, special, tags)
        end = text.rstrip()
        opened = end.endswith(TAGS[0]) and len(end) - len(TAGS[0]) not in places
        return ChatPrompt(text=text, token_ids=tokenizer.encode_typed(text, places), thinking=opened)

    def _variables(
        self,
        messages: Sequence[Message],
        *,
        enable_thinking: bool | None = None,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> dict[str, Any]:
        """What the template is given but for the special tokens, in JSON's types."""
        if not messages:
            raise ValueError("there are no messages")
        for i, message in enumerate(messages):
            if not isinstance(message, Mapping):
                kind = type(message).__name__
                raise ValueError(f"messages[{i}] is a {kind}: a turn is an object with role and content")
        if enable_thinking is not None:
            variables["enable_thinking"] = enable_thinking
        return {
            "messages": [_json(message, f"messages[{i}]") for i, message in enumerate(messages)],
            "tools": _json(tools, "tools"),
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **{name: _json(value, name) for name, value in variables.items()},
        }

    def _render(self, variables: Mapping[str, Any]) -> str:
        try:
            return self._renderer.render(
                json.dumps({**self._special_tokens, **variables}, ensure_ascii=False)
            )
        except TemplateError as error:
            raise ValueError(f"{self._where}: the chat template refuses the messages: {error}") from None


def _json(value: Any, what: str) -> Any:
    """``value`` in JSON's types, and valid text throughout.

    Raises:
        ValueError: it is neither, with ``what`` it is.
    """

    def check(text: str) -> str:
        check_text(text, what)
        return text

    try:
        plain = json.loads(json.dumps(value, default=_mapping, ensure_ascii=False))
        return change_strings(plain, check)
    except (TypeError, RecursionError) as error:
        raise ValueError(f"{what} cannot be written as JSON: {error}") from None


def _mapping(value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is neither text, number, list nor object")
