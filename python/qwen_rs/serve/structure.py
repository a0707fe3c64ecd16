"""Answers of a given structure: JSON, or JSON of a schema, token by token through llguidance.

The structure holds from the answer on, not in the thinking before it, and it fails closed: no token that it
does not allow is ever sampled.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from ..checkpoint.reasoning import TAGS
from ..checkpoint.tokenizer import Tokenizer
from .errors import RequestError

OPTIONS: Any = {"whitespace_flexible": False}
"""No white space between the tokens of JSON: a small model may go on with it until its tokens end."""


class Structures:
    """What a model needs for structured answers.

    Args:
        directory: the checkpoint's.
        tokenizer: the same checkpoint's.
        vocab_size: of the model, which may be larger than the tokenizer's.
        end_ids: the tokens that end a sequence.
    """

    def __init__(
        self, directory: Path, tokenizer: Tokenizer, vocab_size: int, end_ids: Iterable[int]
    ) -> None:
        self.vocab_size, self.end_ids = vocab_size, sorted(end_ids)
        self._guide = LLTokenizer(
            (directory / "tokenizer.json").read_text(encoding="utf-8"),
            n_vocab=vocab_size,
            eos_token=self.end_ids,
        )
        self.tags = tuple(tokenizer.token_id(tag) for tag in TAGS)

    def schema(self, schema: dict[str, Any], field: str) -> str:
        """A grammar of JSON of a schema.

        Raises:
            RequestError: the schema is none, or has what the grammar cannot keep.
        """
        try:
            grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=OPTIONS)
            wrong, messages = LLMatcher.validate_grammar_with_warnings(grammar, self._guide)
        except (ValueError, RecursionError) as error:
            wrong, messages = True, [str(error)]
        if wrong or messages:  # what is warned of would not be kept
            reason = (messages[0].strip().splitlines() or ["it cannot be used"])[0]
            raise RequestError(400, f"{field}: {reason}", param=field)
        return grammar

    def constraint(self, grammar: str, *, opened: bool, may_think: bool) -> Constraint:
        """What one sequence may say.

        Args:
            grammar: of its answer.
            opened: its prompt ends inside its thinking.
            may_think: it may begin with thinking.
        """
        return Constraint(self, LLMatcher(self._guide, grammar), opened=opened, may_think=may_think)


class Constraint:
    """The tokens that may come next in one sequence."""

    def __init__(self, owner: Structures, matcher: LLMatcher, *, opened: bool, may_think: bool) -> None:
        self._matcher, self._thinking = matcher, opened
        self._open, self._close = owner.tags
        self._may_think = may_think and None not in owner.tags
        self._seen = 0
        thinking = bytearray(b"\xff" * (-(-owner.vocab_size // 32) * 4))
        for token in owner.end_ids:  # an answer comes before the end
            thinking[token // 8] &= ~(1 << token % 8)
        self._while_thinking = bytes(thinking)

    def allowed(self, token_ids: Sequence[int]) -> bytes:
        """A bit for each token, the lowest of a byte first, after the tokens generated so far.

        Raises:
            RequestError: the grammar is too much for its limits.
        """
        for token in token_ids[self._seen :]:
            if self._thinking:
                self._thinking = token != self._close
            elif self._may_think and self._seen == 0 and token == self._open:
                self._thinking = True
            else:
                self._matcher.consume_token(token)
            self._seen += 1
        if self._thinking:
            return self._while_thinking
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise RequestError(500, f"response_format: {self._matcher.get_error().splitlines()[0]}")
        if self._may_think and self._seen == 0 and self._open is not None:
            both = bytearray(mask)
            both[self._open // 8] |= 1 << self._open % 8
            mask = bytes(both)
        return mask
