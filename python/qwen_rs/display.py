"""How generated text is shown: thinking apart from the answer, dim on a terminal."""

from __future__ import annotations

import os
import sys

from .checkpoint.reasoning import Part, ReasoningSplitter


class Display:
    """What is written of the text: on a terminal thinking is dim, and apart from the answer; a pipe carries
    the text as it was generated. Without ``thinking`` both show the answer alone."""

    def __init__(self, opened: bool, *, thinking: bool, chat: bool) -> None:
        terminal = sys.stdout.isatty()
        apart = not thinking or (chat and terminal)
        self._splitter = ReasoningSplitter(opened=opened) if apart else None
        self._thinking = thinking
        self._dim = ("\x1b[2m", "\x1b[0m") if terminal and not os.environ.get("NO_COLOR") else ("", "")
        self._last: str | None = None
        self.in_a_line = False
        """What was shown does not end with a line end."""

    def push(self, text: str) -> str:
        return self._shown(self._show(self._splitter.push(text)) if self._splitter is not None else text)

    def flush(self) -> str:
        return self._shown(self._show(self._splitter.flush()) if self._splitter is not None else "")

    def _shown(self, text: str) -> str:
        if visible := text.removesuffix(self._dim[1]):
            self.in_a_line = not visible.endswith("\n")
        return text

    def _show(self, parts: list[Part]) -> str:
        out = ""
        for kind, text in parts:
            if kind == "reasoning" and not self._thinking:
                continue
            if self._last not in (None, kind):
                out, text = f"{out}\n\n", text.lstrip("\n")
            self._last = kind
            before, after = self._dim if kind == "reasoning" else ("", "")
            out += f"{before}{text}{after}"
        return out
