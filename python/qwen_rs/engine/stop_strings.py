"""Stop strings, found in text as it streams."""

from __future__ import annotations

from collections.abc import Collection


class StopStrings:
    """Finds stop strings in streamed text and holds back what may be the beginning of one.

    Of several the one that begins first wins, of two that begin together the longer: in the whole text,
    however it is cut into pieces. So a string that was found waits while an earlier or longer one may
    still be completed.

    Special tokens are no part of the text, but a stop string in which one is written out is looked for
    in the text with special tokens; every other one in the text without. A special token that is a stop
    string itself ends the text: nothing waits for what would come after it.

    Args:
        stop: the strings.
        special: the texts of all special tokens.

    >>> stops = StopStrings(["END", "<|im_end|>"], ["<|im_end|>"])
    >>> stops.push("the E"), stops.push("ND and on")
    (('the ', None), ('', 'END'))
    >>> stops.push("an E"), stops.push("", "<|im_end|>")
    (('an ', None), ('E', '<|im_end|>'))
    """

    def __init__(self, stop: Collection[str], special: Collection[str] = ()) -> None:
        self._stops = [(s, any(token in s for token in special)) for s in stop]
        self._firsts = {s[0] for s in stop}
        self._held: list[tuple[str, bool]] = []  # (character, is it a special token's)

    def push(self, text: str, special: str = "") -> tuple[str, str | None]:
        """More text, and the special token after it.

        Returns:
            ``(text that is surely before any stop string, the stop string that was found)``.
        """
        if not self._stops:
            return text, None
        self._held += [(character, False) for character in text]
        self._held += [(character, True) for character in special]
        return self._split(more=all(special != stop for stop, _ in self._stops))

    def flush(self) -> tuple[str, str | None]:
        """As ``push`` for the end of the text: what is incomplete now is no stop string."""
        return self._split(more=False)

    def _split(self, more: bool) -> tuple[str, str | None]:
        for at, (character, special) in enumerate(self._held):
            if character not in self._firsts:
                continue
            tails = {
                True: "".join(c for c, _ in self._held[at:]),
                False: "" if special else "".join(c for c, hidden in self._held[at:] if not hidden),
            }
            found = max((s for s, full in self._stops if tails[full].startswith(s)), key=len, default="")
            if more and any(
                len(s) > max(len(tails[full]), len(found)) and tails[full] and s.startswith(tails[full])
                for s, full in self._stops
            ):
                return self._release(at), None
            if found:
                text = self._release(at)
                self._held.clear()
                return text, found
        return self._release(len(self._held)), None

    def _release(self, count: int) -> str:
        text = "".join(character for character, special in self._held[:count] if not special)
        del self._held[:count]
        return text
