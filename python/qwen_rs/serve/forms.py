"""Answers in OpenAI's shapes, whole and in chunks."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from ..checkpoint.reasoning import ReasoningSplitter
from ..checkpoint.tokenizer import Tokenizer
from ..engine.sequence import SequenceState

Json = dict[str, Any]


class Form:
    """The shape of an answer of several choices.

    Args:
        model: the name that the answer carries.
        fingerprint: of the model.
        tokenizer: for the texts of tokens.
        sequences: the choices.
        num_choices: of each prompt: the first n sequences are the first prompt's.
    """

    whole_object, chunk_object, prefix = "", "", ""

    def __init__(
        self,
        *,
        model: str,
        fingerprint: str,
        tokenizer: Tokenizer,
        sequences: Sequence[SequenceState],
        num_choices: int,
    ) -> None:
        self.sequences, self.num_choices, self.tokenizer = sequences, num_choices, tokenizer
        self._head: Json = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }

    def whole(self) -> Json:
        """The answer, after all sequences have ended."""
        choices = []
        for index, sequence in enumerate(self.sequences):
            choice = self.choice(index, sequence)
            choices.append({"index": index, **choice, **self._end(sequence, choice)})
        return {**self._head, "object": self.whole_object, "choices": choices, "usage": self.usage()}

    def chunk(self, index: int, text: str, first: int, end: int, *, last: bool) -> list[Json]:
        """Chunks with what a choice has new: ``text`` and tokens ``first`` to ``end``."""
        sequence = self.sequences[index]
        choices = self.deltas(index, text, first, end, last=last)
        for choice in choices:
            choice["finish_reason"] = None
        if last:
            choices[-1] |= self._end(sequence, choices[-1])
        return [self._chunk([{"index": index, **choice}]) for choice in choices]

    def usage_chunk(self) -> Json:
        """The chunk after the last: no choices, the usage."""
        return self._chunk([]) | {"usage": self.usage()}

    def usage(self) -> Json:
        firsts = self.sequences[:: self.num_choices]
        prompt = sum(len(sequence.prompt_ids) for sequence in firsts)
        generated = sum(len(sequence.token_ids) for sequence in self.sequences)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": sum(s.cached_tokens for s in firsts)},
        }

    def choice(self, index: int, sequence: SequenceState) -> Json:
        """What is said of a sequence that has ended."""
        raise NotImplementedError

    def deltas(self, index: int, text: str, first: int, end: int, *, last: bool) -> list[Json]:
        """The same in parts, at least one where ``last``."""
        raise NotImplementedError

    def finish_reason(self, index: int, sequence: SequenceState) -> str | None:
        return sequence.finish_reason

    def _end(self, sequence: SequenceState, choice: Json) -> Json:
        index = next(i for i, own in enumerate(self.sequences) if own is sequence)
        return {
            "finish_reason": self.finish_reason(index, sequence),
            "stop_reason": sequence.stop_reason,
            "seed": sequence.params.seed,
        }

    def _chunk(self, choices: list[Json]) -> Json:
        return {**self._head, "object": self.chunk_object, "choices": choices}

    def _likeliest(self, sequence: SequenceState, row: dict[int, float]) -> list[tuple[int, float]]:
        ordered = sorted(row.items(), key=lambda item: -item[1])
        return ordered[: sequence.params.logprobs or 0]


class ChatForm(Form):
    """``chat.completion``: thinking apart from the answer.

    Args:
        opened: the prompts ended inside ``<think>``.
        logprobs: whether tokens are told with theirs.
    """

    whole_object, chunk_object, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, *, opened: bool, logprobs: bool, **common: Any) -> None:
        super().__init__(**common)
        self._logprobs = logprobs
        self._splitters = [ReasoningSplitter(opened=opened) for _ in self.sequences]
        self._begun: set[int] = set()

    def choice(self, index: int, sequence: SequenceState) -> Json:
        message: Json = {"role": "assistant", "content": None, "refusal": None}
        for delta in self._parts(index, sequence.text, last=True):
            for name, text in delta.items():
                message[name] = (message.get(name) or "") + text
        if message["content"] is None:
            message["content"] = ""
        return {"message": message, "logprobs": self._rows(sequence, 0, len(sequence.token_ids))}

    def deltas(self, index: int, text: str, first: int, end: int, *, last: bool) -> list[Json]:
        deltas = self._parts(index, text, last=last)
        if index not in self._begun:
            self._begun.add(index)
            deltas.insert(0, {"role": "assistant", "content": ""})
        rows = self._rows(self.sequences[index], first, end)
        if not deltas and (last or rows is not None):
            deltas = [{}]
        choices: list[Json] = [{"delta": delta, "logprobs": None} for delta in deltas]
        if choices:
            choices[-1]["logprobs"] = rows
        return choices

    def _parts(self, index: int, text: str, *, last: bool) -> list[Json]:
        splitter = self._splitters[index]
        parts = splitter.push(text) + (splitter.flush() if last else [])
        return [
            {"content": text} if kind == "content" else {"reasoning_content": text, "reasoning": text}
            for kind, text in parts
        ]

    def _rows(self, sequence: SequenceState, first: int, end: int) -> Json | None:
        if not self._logprobs:
            return None
        rows = []
        for token, row in zip(sequence.token_ids[first:end], sequence.logprobs[first:end], strict=True):
            top = [self._token(other, value) for other, value in self._likeliest(sequence, row)]
            rows.append({**self._token(token, row[token]), "top_logprobs": top})
        return {"content": rows, "refusal": None}

    def _token(self, token: int, logprob: float) -> Json:
        spelled = self.tokenizer.token_bytes(token)
        return {"token": self.tokenizer.token_text(token), "logprob": logprob, "bytes": list(spelled)}


class CompletionForm(Form):
    """``text_completion``.

    Args:
        echo: the texts of the prompts, which stand before the answers'; None: they do not.
        generated: whether the generated tokens are told at all; False for ``max_tokens`` 0.
    """

    whole_object = chunk_object = "text_completion"
    prefix = "cmpl"

    def __init__(self, *, echo: Sequence[str] | None, generated: bool = True, **common: Any) -> None:
        super().__init__(**common)
        self._echo, self._generated = echo, generated
        self._offsets: dict[int, int] = {}

    def choice(self, index: int, sequence: SequenceState) -> Json:
        deltas = self.deltas(index, sequence.text, 0, len(sequence.token_ids), last=True)
        return deltas[0]

    def usage(self) -> Json:
        usage = super().usage()
        if not self._generated:
            usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        return usage

    def finish_reason(self, index: int, sequence: SequenceState) -> str | None:
        return super().finish_reason(index, sequence) if self._generated else "length"

    def deltas(self, index: int, text: str, first: int, end: int, *, last: bool) -> list[Json]:
        sequence = self.sequences[index]
        if not self._generated:
            text, end = "", first
        begins = index not in self._offsets
        self._offsets.setdefault(index, 0)
        tokens: list[tuple[int, dict[int, float] | None]] = []
        if begins and self._echo is not None:
            text = self._echo[index // self.num_choices] + text
            if sequence.prompt_logprobs is not None:
                rows: list[dict[int, float] | None] = [None, *sequence.prompt_logprobs]
                tokens += zip(sequence.prompt_ids, rows, strict=True)
        wanted = sequence.params.logprobs is not None
        if wanted:
            tokens += zip(sequence.token_ids[first:end], sequence.logprobs[first:end], strict=True)
        if not (text or last or tokens):
            return []
        return [{"text": text, "logprobs": self._rows(index, tokens) if wanted else None}]

    def _rows(self, index: int, tokens: list[tuple[int, dict[int, float] | None]]) -> Json:
        rows: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, row in tokens:
            spelled = self._spelled(token)
            rows["tokens"].append(spelled)
            rows["token_logprobs"].append(None if row is None else row[token])
            top: dict[str, float] | None = None if row is None else {}
            if top is not None and row is not None:
                for other, value in self._likeliest(self.sequences[index], row):
                    top.setdefault(self._spelled(other), value)  # the likeliest of those spelled alike
            rows["top_logprobs"].append(top)
            rows["text_offset"].append(self._offsets[index])
            self._offsets[index] += len(self.tokenizer.token_text(token))
        return rows

    def _spelled(self, token: int) -> str:
        """A token's text; one that is no whole character as OpenAI writes it, ``bytes:\\\\xf0``."""
        text, spelled = self.tokenizer.token_text(token), self.tokenizer.token_bytes(token)
        if text.encode() == spelled:
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)
