"""Which control tokens of a rendered prompt are the template's own, and which a message only spells out.

A template may cut, join, strip and compare the text of messages, so that where it ends up cannot be followed
from outside. It is marked instead. The messages are rendered a second time with a mark, a character that is
nowhere in the conversation, after each character with which a control token could begin:

    text    = render(messages)
    marked  = render(messages, "<" -> "<" + mark)
    marked without its marks == text: a control token at a marked "<" is text that was typed

No cutting or joining makes an unmarked "<" of a marked one, and the comparison shows whether the template
treats the marks as it treats the text. One that looks for ``<think>`` in an answer does not. So tags which
are added tokens but not special ones (``<think>``, ``<tool_call>``) are spared in what the assistant said,
where they are the model's own, and when the texts still differ, everywhere. When they differ even then,
special tokens alone are marked, where they are spelled out whole. When they differ at last, that marked
rendering is taken: the template has not recognized what the messages spell out, and nor does anybody.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

MARKS = range(0xFDD0, 0x110000)
"""Candidates for the mark: first the noncharacters, which no text has."""


def typed_places(
    render: Callable[[Mapping[str, Any]], str],
    variables: Mapping[str, Any],
    source: str,
    special: Collection[str],
    tags: Collection[str],
) -> tuple[str, list[int]]:
    """A rendering, and the characters of it that begin no control token of the template's.

    Args:
        render: the text for variables.
        variables: what the template is given, JSON's types alone; all text in them is the user's.
        source: the template.
        special: the spellings of all special tokens.
        tags: those of added tokens that are control tokens without being special.

    Raises:
        ValueError: the template refuses the messages.
    """
    text = render(variables)
    strings: list[str] = []
    change_strings(variables, lambda string: strings.append(string) or string)  # type: ignore[func-returns-value]
    typed = "\0".join(strings)
    control = {*special, *tags}
    # A token that begins with a letter is looked for as a whole: names of roles stay as they are.
    signs = {token[0] for token in control if not (token[0].isalnum() or token[0].isspace())}
    begins = [re.escape(sign) for sign in signs] + [
        f"{re.escape(token[0])}(?={re.escape(token[1:])})" for token in control if token[0] not in signs
    ]
    if not begins or re.search("|".join(begins), typed) is None:
        return text, []
    mark = next(c for c in map(chr, MARKS) if not any(m in typed + source for m in _spellings(c)))
    spared = [
        tag
        for tag in tags
        if not any(token.startswith(tag) for token in special) and not any(sign in tag[1:] for sign in signs)
    ]
    spare = [re.escape(tag) for tag in sorted(spared, key=len, reverse=True)]
    bare, sparing = (re.compile("|".join([*skip, f"({'|'.join(begins)})"])) for skip in ([], spare))
    wholes = (f"{re.escape(t[0])}(?={re.escape(t[1:])})" for t in sorted(special, key=len, reverse=True))
    whole = re.compile(f"({'|'.join(wholes) or '(?!)'})")

    def marks(pattern: re.Pattern[str]) -> Callable[[str], str]:
        return lambda string: pattern.sub(lambda m: m[0] + mark if m[1] else m[0], string)

    for ordinary, assistant in ((bare, sparing), (sparing, sparing), (whole, whole)):
        try:
            marked = render(_marked(variables, marks(ordinary), marks(assistant)))
        except ValueError:
            if ordinary is whole:
                raise
            continue
        pieces = re.split("|".join(map(re.escape, _spellings(mark))), marked)
        if "".join(pieces) == text:
            break
    places, at = [], 0
    for piece in pieces[:-1]:
        at += len(piece)
        places.append(at - 1)
    return "".join(pieces), places


def _spellings(mark: str) -> tuple[str, str]:
    """A character, and as JSON of ASCII alone writes it."""
    return mark, json.dumps(mark)[1:-1]


def _marked(
    variables: Mapping[str, Any], ordinary: Callable[[str], str], assistant: Callable[[str], str]
) -> dict[str, Any]:
    out: dict[str, Any] = change_strings(variables, ordinary)
    out["messages"] = [
        change_strings(m, assistant if m.get("role") == "assistant" else ordinary)
        for m in variables["messages"]
    ]
    return out


def change_strings(value: Any, change: Callable[[str], str]) -> Any:
    """JSON with every string in it, keys too, changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change_strings(k, change): change_strings(v, change) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [change_strings(v, change) for v in value]
    return value
