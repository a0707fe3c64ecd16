"""What counts as a conversation, and whether a chat template reads all of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..checkpoint.chat_template import Message
from .arguments import shown

EXPECTED = "a conversation is a list of messages, each a dict with role and content"
ROLES = ("system", "user", "assistant", "tool")
"""What a template may know; others are named only if a message has them."""


def as_conversations(messages: Any) -> tuple[list[list[dict[str, Any]]], bool]:
    """Conversations, and whether it was one conversation.

    Raises:
        ValueError: it is neither a conversation nor a list of them.
    """
    items = _list(messages, "messages")
    if isinstance(items[0], Mapping):
        return [as_conversation(items)], True
    return [as_conversation(item, f"messages[{i}]") for i, item in enumerate(items)], False


def as_conversation(messages: Any, name: str = "messages") -> list[dict[str, Any]]:
    """A conversation whose content is all text.

    Raises:
        ValueError: it is none, or is empty; a role is no text; content is neither text nor a list of
            text parts.
    """
    return [_message(item, f"{name}[{i}]") for i, item in enumerate(_list(messages, name))]


def refuse_unread_roles(render: Callable[[Sequence[Message]], str], messages: Sequence[Message]) -> None:
    """Checks that ``render`` reads the messages of every role.

    A role is not read if other content in all of its messages renders as the same prompt. Messages
    with tool calls are left out of this: a template may show the calls alone.

    Raises:
        ValueError: a role is not read; the message names it and those that are, in its place.
    """
    prompt = render(messages)
    for role in dict.fromkeys(m["role"] for m in messages if _says_something(m)):
        if _renders_as(render, [_other(m) if m["role"] == role else m for m in messages], prompt):
            known = [name for name in ROLES if name != role and _is_read(render, messages, role, name)]
            reads = f"; it reads {', '.join(known)}" if known else ""
            raise ValueError(f"the chat template leaves out messages of the role {role!r}{reads}")


def _is_read(
    render: Callable[[Sequence[Message]], str], messages: Sequence[Message], role: str, name: str
) -> bool:
    """Whether messages of ``role`` would be read if their role were ``name``."""
    renamed = [{**m, "role": name} if m["role"] == role else m for m in messages]
    changed = [_other(new) if m["role"] == role else m for m, new in zip(messages, renamed, strict=True)]
    try:
        return not _renders_as(render, changed, render(renamed))
    except ValueError:
        return False


def _renders_as(render: Callable[[Sequence[Message]], str], messages: Sequence[Message], prompt: str) -> bool:
    try:
        return render(messages) == prompt
    except ValueError:  # a template that refuses a message has read it
        return False


def _other(message: Message) -> Message:
    """The message with content that begins otherwise and is longer, if it says something."""
    if not _says_something(message):
        return message
    content = message["content"]
    return {**message, "content": ("b" if content.startswith("a") else "a") * (len(content) + 1)}


def _says_something(message: Message) -> bool:
    return bool(str(message.get("content") or "").strip()) and not message.get("tool_calls")


def _message(message: Any, name: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ValueError(f"{name} is {type(message).__name__}: {shown(message)}; {EXPECTED}")
    if not isinstance(message.get("role"), str):
        raise ValueError(f"{name} has no role that is text; {EXPECTED}")
    if "content" not in message and not message.get("tool_calls"):
        raise ValueError(f"{name} has no content; {EXPECTED}")
    content = message.get("content")
    if isinstance(content, str) or content is None:
        return dict(message)
    return {**message, "content": _text(content, f"{name}: content")}


def _text(content: Any, name: str) -> str:
    """Text parts, a line each, as vLLM and llama.cpp join them."""
    if not isinstance(content, list | tuple):
        raise ValueError(f"{name} must be text or a list of text parts, not {type(content).__name__}")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        text = part.get("text") if isinstance(part, Mapping) else None
        if kind != "text" or not isinstance(text, str):
            raise ValueError(
                f'{name} has a part of type {kind!r}; parts must be {{"type": "text", "text": ...}}'
            )
        texts.append(text)
    return "\n".join(texts)


def _list(value: Any, name: str) -> list[Any]:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise ValueError(f"{name} is {type(value).__name__}: {shown(value)}; {EXPECTED}")
    if not value:
        raise ValueError(f"{name} is empty: there are no messages")
    return list(value)
