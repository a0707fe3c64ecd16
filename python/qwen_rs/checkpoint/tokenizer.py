"""Text to token ids and back, and text as it streams."""

from __future__ import annotations

import functools
import json
import re
import stat
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from .._core import ModelError

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


MAX_FILE = 256 << 20
"""Bytes of a checkpoint's text file; a tokenizer of 150,000 tokens has 11 million."""


def read_file(path: Path) -> bytes:
    """The bytes of a checkpoint's text file.

    Raises:
        OSError: the file cannot be read.
        ModelError: it is not a file, or not of this kind.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ModelError(f"{path}: not a file")  # a pipe would be waited for, a device never ends
    if status.st_size > MAX_FILE:
        raise ModelError(f"{path}: too large ({status.st_size} bytes)")
    return path.read_bytes()


def read_json(path: Path) -> Any:
    """The JSON of a checkpoint's file.

    Raises:
        OSError: the file cannot be read.
        ModelError: it is not JSON, with its path.
    """
    try:
        return json.loads(read_file(path).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not valid JSON: {error}") from None


def _byte_alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for (GPT-2's): printable ones stand for
    themselves, the others follow from U+0100 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


BYTES = _byte_alphabet()


def check_text(text: str, what: str) -> None:
    """Refuses what is no text: half a surrogate pair, or bytes that were no UTF-8 where Python read them.

    Raises:
        ValueError: with ``what`` is wrong, such as "the prompt".

    >>> check_text("a\\udcff", "the prompt")
    Traceback (most recent call last):
    ValueError: the prompt is not valid text: character 1 is the byte 0xff, which is not UTF-8
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        escaped = 0xDC80 <= code <= 0xDCFF  # Python's surrogateescape
        why = f"the byte {code - 0xDC00:#x}, which is not UTF-8" if escaped else f"half a pair, U+{code:04X}"
        raise ValueError(f"{what} is not valid text: character {error.start} is {why}") from None


class Tokenizer:
    """A checkpoint's ``tokenizer.json``, through the tokenizers library.

    >>> tokenizer = Tokenizer(Path(__file__).parents[1] / "demo")
    >>> ids = tokenizer.encode("Emma Woodhouse, handsome, clever, and rich")
    >>> tokenizer.decode(ids)
    'Emma Woodhouse, handsome, clever, and rich'
    """

    def __init__(self, directory: Path) -> None:
        """
        Raises:
            OSError: there is no ``tokenizer.json``, or it cannot be read.
            ModelError: it is not a tokenizer.
        """
        path = directory / "tokenizer.json"
        text = read_file(path).decode("utf-8", errors="replace")
        self._path = path
        with self._failures("not a tokenizer"):
            self._tokenizer = tokenizers.Tokenizer.from_str(text)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        config_path = directory / "tokenizer_config.json"
        config = read_json(config_path) if config_path.exists() else {}
        if not isinstance(config, dict):
            raise ModelError(f"{config_path}: an object is expected")
        self.config: dict[str, Any] = config

    @property
    def vocab_size(self) -> int:
        """Tokens, added ones included."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``; none are added.

        Args:
            text: the text.
            special_tokens: whether tokens that the tokenizer adds to its vocabulary, such as
                ``<|im_end|>``, are recognized where the text spells them out. With False all of it is
                ordinary text, as what a user types has to be.

        Raises:
            ValueError: the text is no valid Unicode.
            ModelError: the tokenizer cannot encode it.
        """
        check_text(text, "the prompt")
        tokenizer = self._tokenizer if special_tokens else self._plain()
        with self._failures("the tokenizer fails"):
            return list(tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_typed(self, text: str, places: Sequence[int]) -> list[int]:
        """Token ids of ``text`` in which control tokens that touch ``places`` are ordinary text.

        What is left of the added tokens cuts the text, as it does in ``encode``.

        Args:
            text: a prompt.
            places: indices of characters, in ascending order.

        Raises:
            as ``encode``.
        """
        check_text(text, "the prompt")
        special, tags = self.control_tokens
        with self._failures("the tokenizer fails"):
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
            added = self._tokenizer.get_added_tokens_decoder()
        ids: list[int] = list(encoding.ids)
        if not places or added.keys().isdisjoint(ids):
            return ids
        control = {i for i, token in added.items() if token.content in special or token.content in tags}
        kept: list[tuple[int, int, int]] = []  # id, start, end
        typed = False
        for token, (start, end) in zip(ids, encoding.offsets, strict=True):
            if token not in added:
                continue
            if token in control and bisect_left(places, start) < bisect_left(places, end):
                typed = True
            else:
                kept.append((token, start, end))
        if not typed:
            return ids
        # Each token that is kept becomes a character which the text does not have, so that what lies
        # between is encoded where it stands: some tokenizers treat the first of it otherwise.
        cut = next(c for c in map(chr, range(0xFDD0, 0x110000)) if c not in text)
        pieces, at = [], 0
        for _, start, end in kept:
            pieces += [text[at:start], cut]
            at = end
        pieces.append(text[at:])
        plain = self._plain()
        plain.add_special_tokens([tokenizers.AddedToken(cut, normalized=False)])
        with self._failures("the tokenizer fails"):
            encoded = plain.encode("".join(pieces), add_special_tokens=False)
        tokens = iter(kept)
        return [next(tokens)[0] if i == plain.token_to_id(cut) else i for i in encoded.ids]

    @cached_property
    def control_tokens(self) -> tuple[frozenset[str], frozenset[str]]:
        """Spellings of the special tokens, and of those added tokens that are control tokens though not
        special: tags such as ``<think>`` and ``<tool_call>``. White space and words are added too."""
        added = self._tokenizer.get_added_tokens_decoder().values()
        special = frozenset(token.content for token in added if token.special)
        tags = (token.content for token in added if re.fullmatch(r"<[^<>\s]+>|\[[^][\s]+\]", token.content))
        return special, frozenset(tags) - special

    def _plain(self) -> tokenizers.Tokenizer:
        """The tokenizer without its added tokens; the vocabulary is shared, not copied."""
        plain = tokenizers.Tokenizer(self._tokenizer.model)
        plain.normalizer = self._tokenizer.normalizer
        plain.pre_tokenizer = self._tokenizer.pre_tokenizer
        return plain

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that form no character become U+FFFD."""
        with self._failures("the tokenizer fails"):
            return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_text(self, token: int) -> str:
        """The text of one token, special tokens and tags written out; incomplete bytes as U+FFFD."""
        return self.decode([token], skip_special_tokens=False)

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token, be they whole characters or not."""
        text = self.token_text(token)
        if REPLACEMENT not in text:
            return text.encode()
        spelled = self._tokenizer.id_to_token(token) or ""
        if all(c in BYTES for c in spelled):
            return bytes(BYTES[c] for c in spelled)
        return text.encode()

    @contextmanager
    def _failures(self, what: str) -> Iterator[None]:
        """A ``ModelError`` for whatever the tokenizers library raises."""
        try:
            yield
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # plain Exception, or its panics, which are not even that
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ModelError(f"{self._path}: {what}: {reason}") from None

    @functools.cached_property
    def special_tokens(self) -> dict[int, str]:
        """The texts of the special tokens, which ``decode`` leaves out, by id."""
        added = self._tokenizer.get_added_tokens_decoder()
        return {i: self.decode([i], skip_special_tokens=False) for i in added if added[i].special}

    def token_id(self, token: str) -> int | None:
        """The id of one token, or None."""
        return self._tokenizer.token_to_id(token)

    def special_token(self, name: str) -> str | None:
        """A token that ``tokenizer_config.json`` names, such as ``eos_token``."""
        value = self.config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        return value if isinstance(value, str) else None


class StreamDecoder:
    """Token ids in, whole characters out.

    Bytes are held until they complete a character, so the pieces joined, with what ``flush`` gives,
    are the text of all ids.

    >>> tokenizer = Tokenizer(Path(__file__).parents[1] / "demo")
    >>> decoder = StreamDecoder(tokenizer)
    >>> [piece for i in tokenizer.encode("\N{GRINNING FACE}") if (piece := decoder.push(i))]
    ['\N{GRINNING FACE}']
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # Ids whose text is out and which the next text is decoded after, then those still held.
        self._before: list[int] = []
        self._held: list[int] = []

    def push(self, token: int) -> str:
        """The text that this token completes; empty while a character is incomplete."""
        self._held.append(token)
        text = self._new_text()
        if not text or text.endswith(REPLACEMENT):
            return ""
        self._before, self._held = self._held, []
        return text

    def flush(self) -> str:
        """What is left at the end, incomplete bytes as U+FFFD; empty when called again."""
        text = self._new_text() if self._held else ""
        self._before, self._held = [], []
        return text

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._before)
        return self._tokenizer.decode(self._before + self._held)[len(before) :]
