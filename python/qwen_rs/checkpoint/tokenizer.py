"""Text to token ids and back, and text as it streams."""

from __future__ import annotations

import functools
import json
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``; special tokens written out in it are recognized, none are added.

        Raises:
            ModelError: the tokenizer cannot encode it.
        """
        with self._failures("the tokenizer fails"):
            return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that form no character become U+FFFD."""
        with self._failures("the tokenizer fails"):
            return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

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
