"""Thinking and answer, told apart in text as it streams."""

from __future__ import annotations

import re
from typing import Literal

Part = tuple[Literal["reasoning", "content"], str]
"""A piece of text, and what it is a piece of."""

TAGS = ("<think>", "</think>")
_TAG = re.compile("|".join(TAGS))


class ReasoningSplitter:
    """Text in, thinking and answer out, in pieces that do not depend on where the text was cut.

    ``<think>`` begins thinking and ``</think>`` ends it, wherever they stand, and neither is given out.
    Newlines inside the tags at their ends, and after ``</think>``, belong to the tags, and so does white
    space before the first thinking; a blank line stands between the thinkings of several blocks.

    Args:
        opened: the prompt ended inside ``<think>``.

    Attributes:
        opened: there has been thinking, be it empty.

    >>> splitter = ReasoningSplitter()
    >>> splitter.push("<think>Is it?</thi"), splitter.push("nk>\\n\\nYes."), splitter.flush()
    ([('reasoning', 'Is it?')], [('content', 'Yes.')], [])
    """

    def __init__(self, *, opened: bool = False) -> None:
        self.opened = opened
        self._thinking = opened
        self._held = ""  # may begin a tag
        self._space = ""  # may belong to the next tag
        self._trim = opened  # newlines belong to the last tag
        self._answered = False  # content other than white space is out
        self._reasoned = False
        self._gap = ""  # before the next reasoning

    def push(self, text: str) -> list[Part]:
        """The pieces that ``text`` sets free; none of them is empty."""
        self._held += text
        parts = []
        while tag := _TAG.search(self._held):
            parts += self._take(self._held[: tag.start()])
            self._held = self._held[tag.end() :]
            self._space, self._trim = "", True
            self._thinking = tag[0] == TAGS[0]
            self.opened |= self._thinking
            self._gap = "\n\n" if self._reasoned else ""
        begun = range(min(len(self._held), len(TAGS[1]) - 1), 0, -1)
        keep = next((n for n in begun if any(tag.startswith(self._held[-n:]) for tag in TAGS)), 0)
        cut = len(self._held) - keep
        parts += self._take(self._held[:cut])
        self._held = self._held[cut:]
        return parts

    def flush(self) -> list[Part]:
        """What was held back at the end."""
        parts = self._take(self._held)
        if self._space and not self._thinking:
            parts.append(("content", self._space))
        self._held = self._space = ""
        return parts

    def _take(self, text: str) -> list[Part]:
        """The pieces of text without tags."""
        if self._trim:
            text = text.lstrip("\n")
        if not text:
            return []
        self._trim = False
        text, self._space = self._space + text, ""
        if self._thinking:
            kept = text.rstrip("\n")
            self._space = text[len(kept) :]
            if not kept:
                return []
            text, self._gap, self._reasoned = self._gap + kept, "", True
            return [("reasoning", text)]
        if not self._answered and text.isspace():
            self._space = text
            return []
        self._answered = True
        return [("content", text)]


def split_reasoning(text: str, *, opened: bool = False) -> tuple[str | None, str]:
    """Thinking and answer of a whole text, as :class:`ReasoningSplitter` tells them apart.

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
    splitter = ReasoningSplitter(opened=opened)
    parts = splitter.push(text) + splitter.flush()
    reasoning = "".join(part for kind, part in parts if kind == "reasoning")
    return reasoning if splitter.opened else None, "".join(part for kind, part in parts if kind == "content")
