"""``LLM``: a checkpoint, its tokenizer, and the generation loop."""

from __future__ import annotations

import asyncio
import itertools
import numbers
import operator
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, overload

from .._core import Cache, Model, Pool
from ..checkpoint.chat_template import ChatPrompt, ChatTemplate, Message
from ..checkpoint.reasoning import split_reasoning
from ..checkpoint.source import end_of_sequence_ids, generation_config, resolve
from ..checkpoint.tokenizer import Tokenizer
from .arguments import checked_keywords
from .metrics import Metrics
from .sampling_params import SamplingParams
from .sequence import Piece, SequenceState

__all__ = ["LLM", "ChatOutput", "Output", "Piece"]

Prompt = str | Sequence[int]
BLOCK_ROWS = 64
"""Rows of a block of the paged cache."""
MAX_BATCH = 16
"""Sequences that are decoded together."""


@dataclass(frozen=True, kw_only=True)
class Output:
    """A finished generation.

    Attributes:
        text: the text, without stop strings and end-of-sequence tokens.
        token_ids: the tokens generated, the one that ended the sequence included.
        finish_reason: ``stop`` (an end-of-sequence token or a stop string) or ``length``.
        stop_reason: the token id or the string that ended it, None for ``length``.
        prompt_token_ids: the tokens of the prompt.
        logprobs: for each token the log probabilities (nats) of it and the likeliest, by token id; None
            unless ``SamplingParams.logprobs`` asks for them.
        metrics: what it took.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: int | str | None
    prompt_token_ids: list[int]
    logprobs: list[dict[int, float]] | None
    metrics: Metrics


@dataclass(frozen=True, kw_only=True)
class ChatOutput(Output):
    """A finished answer.

    Attributes:
        content: the answer.
        reasoning: the thinking before it, or None. With ``finish_reason`` ``length`` and an empty
            answer, thinking took all of ``max_tokens``.
    """

    content: str
    reasoning: str | None


class LLM:
    """A Qwen3 model, ready to generate.

    Args:
        model: ``"demo"`` (the bundled model), a checkpoint directory, or a hub id.
        dtype: how weights are kept: ``q8_0``, ``bf16`` or ``f32``.
        kv: the KV cache: ``basic`` (zero-copy), ``paged`` (prompts that begin alike share storage) or
            ``concat`` (the copying baseline).
        kv_dtype: what the cache stores: ``f32`` or ``f16``.
        backend: ``simd`` (the best kernels, all threads) or ``scalar`` (portable kernels, one thread).
        threads: worker threads; None: as many as this process may use.
        max_context: the most tokens of prompt and output together; None: what the model allows.
        progress: called with the share of the weights that is loaded, 0 to 1.

    Attributes:
        tokenizer: the checkpoint's :class:`Tokenizer`.
        config: the model's shape, in the checkpoint's own names.
        chat_template: the checkpoint's :class:`ChatTemplate`, or None.
        generation_config: what ``generation_config.json`` says.
        eos_token_ids: every id that ends a sequence.
        max_context: the most tokens of prompt and output together.

    Raises:
        ValueError: an argument cannot be used.
        OSError: a file cannot be read, or the hub cannot be reached.
        ModelError: the checkpoint is wrong.
        MemoryError: there is no memory for the weights.

    An ``LLM`` is a context manager, and may be shared by threads, which take turns step by step; each
    generation has a cache of its own. It cannot be pickled. A forked child may use it, on one thread.

    >>> llm = LLM("demo", threads=1)
    >>> output = llm.generate("It is a truth", SamplingParams(max_tokens=4, temperature=0))
    >>> len(output.token_ids), output.finish_reason, output.stop_reason
    (4, 'length', None)
    >>> llm.config["num_hidden_layers"], llm.config["head_dim"]
    (6, 64)
    >>> llm.close()
    >>> llm.generate("It is a truth")
    Traceback (most recent call last):
    ValueError: the LLM is closed
    """

    @checked_keywords
    def __init__(
        self,
        model: str | os.PathLike[str] = "demo",
        *,
        dtype: str = "q8_0",
        kv: str = "basic",
        kv_dtype: str = "f32",
        backend: str = "simd",
        threads: int | None = None,
        max_context: int | None = None,
        progress: Callable[[float], object] | None = None,
    ) -> None:
        if kv not in ("basic", "paged", "concat"):
            raise ValueError(f"kv must be basic, paged or concat, not {kv!r}")
        if kv_dtype not in ("f32", "f16"):
            raise ValueError(f"kv_dtype must be f32 or f16, not {kv_dtype!r}")
        if backend == "scalar" and threads not in (None, 1):
            raise ValueError(f"the scalar backend has one thread, not {threads}")
        if threads is not None and threads < 1:
            raise ValueError(f"threads must be at least 1, not {threads}")
        started = time.perf_counter()
        self.directory = resolve(model)
        self._model: Model | None = Model.load(
            self.directory, dtype=dtype, backend=backend, threads=threads, progress=progress
        )
        self.tokenizer = Tokenizer(self.directory)
        self.chat_template = ChatTemplate.of(self.directory, self.tokenizer)
        self.generation_config = generation_config(self.directory)
        self.eos_token_ids = end_of_sequence_ids(self.directory, self.generation_config, self.tokenizer)
        self.config: dict[str, Any] = self._model.config
        self.kv, self.kv_dtype = kv, kv_dtype
        most = int(self.config["max_position_embeddings"])
        if max_context is not None and not 1 <= max_context <= most:
            raise ValueError(f"max_context must be 1 to {most}, not {max_context}")
        self.max_context = most if max_context is None else max_context
        self.load_ms = 1000 * (time.perf_counter() - started)

    @property
    def model(self) -> Model:
        """The core model.

        Raises:
            ValueError: the LLM is closed.
        """
        if self._model is None:
            raise ValueError("the LLM is closed")
        return self._model

    def close(self) -> None:
        """Lets go of the weights; may be called twice."""
        self._model = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @overload
    def generate(self, prompts: str | Sequence[int], params: SamplingParams | None = None) -> Output: ...
    @overload
    def generate(
        self, prompts: list[str] | list[list[int]], params: SamplingParams | None = None
    ) -> list[Output]: ...

    def generate(self, prompts: Any, params: SamplingParams | None = None) -> Output | list[Output]:
        """Generates from a prompt, or from a list of prompts together.

        A prompt is text or a list of token ids. Each output of a list is bit-identical to that of its
        prompt alone.

        Raises:
            ValueError: a prompt is empty, longer than the context, or has an id outside the
                vocabulary.
            CacheError: the cache has no room.

        >>> llm = LLM("demo")
        >>> params = SamplingParams(max_tokens=5, seed=1)
        >>> one, two = llm.generate(["Emma", "Mr. Darcy"], params)
        >>> one.token_ids == llm.generate("Emma", params).token_ids
        True
        >>> llm.generate("")
        Traceback (most recent call last):
        ValueError: the prompt is empty
        """
        if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], numbers.Integral)):
            return self._outputs([prompts], params)[0]
        return self._outputs(list(prompts), params)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Piece]:
        """Generates piece by piece: whole characters as soon as they are complete.

        The pieces' texts joined are the text that ``generate`` gives. A stream may be dropped at any
        time.

        Raises:
            as ``generate``, before the first piece.

        >>> llm = LLM("demo")
        >>> pieces = list(llm.stream("Emma", SamplingParams(max_tokens=5, seed=1)))
        >>> sum(len(piece.token_ids) for piece in pieces), pieces[-1].finish_reason
        (5, 'length')
        """
        return self.pieces(self.start(prompt, params))

    async def astream(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncIterator[Piece]:
        """``stream`` for asyncio: each step runs in a worker thread, so that other tasks go on.

        Raises:
            as ``stream``.
        """
        pieces = self.stream(prompt, params)
        while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
            yield piece

    @checked_keywords
    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        enable_thinking: bool | None = None,
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> ChatOutput:
        """Answers a conversation, through the checkpoint's chat template.

        What the messages and tools say is text, even where it spells out a control token.

        Args:
            messages: turns with ``role`` and ``content``.
            params: as for ``generate``.
            enable_thinking: the template's thinking switch; None leaves it to the template.
            tools: descriptions of functions that the model may call.

        Raises:
            ValueError: the checkpoint has no template, or the template refuses the messages; and as
                ``generate``.
        """
        prompt = self.chat_prompt(messages, enable_thinking=enable_thinking, tools=tools)
        (output,) = self._outputs([prompt.token_ids], params)
        reasoning, content = split_reasoning(output.text, opened=prompt.thinking)
        return ChatOutput(**vars(output), reasoning=reasoning, content=content)

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        enable_thinking: bool | None = None,
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> str:
        """The text of the prompt that ``chat`` generates from.

        Raises:
            ValueError: as ``chat``.
        """
        return self._template().render(messages, enable_thinking=enable_thinking, tools=tools)

    def chat_prompt(
        self,
        messages: Sequence[Message],
        *,
        enable_thinking: bool | None = None,
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> ChatPrompt:
        """The prompt that ``chat`` generates from, in tokens too.

        Raises:
            ValueError: as ``chat``.
        """
        return self._template().prompt(messages, self.tokenizer, enable_thinking=enable_thinking, tools=tools)

    def _template(self) -> ChatTemplate:
        if self.chat_template is None:
            raise ValueError(f"{self.directory}: the checkpoint has no chat template")
        return self.chat_template

    def output(self, state: SequenceState) -> Output:
        """The output of a sequence that has ended."""
        assert state.finish_reason is not None and state.params.seed is not None
        model = self.model
        metrics = Metrics(
            backend=model.backend,
            isa=model.isa,
            threads=model.threads,
            dtype=model.dtype,
            kv_cache=self.kv,
            kv_dtype=self.kv_dtype,
            forward_ms=tuple(state.forward_ms),
            prompt_tokens=len(state.prompt_ids),
            cached_tokens=state.cached_tokens,
            generated_tokens=len(state.token_ids),
            finish_reason=state.finish_reason,
            load_ms=self.load_ms,
            weight_bytes=model.weight_bytes,
            kv_bytes=state.cache.kv_bytes,
            seed=state.params.seed,
        )
        return Output(
            text=state.text,
            token_ids=state.token_ids,
            finish_reason=state.finish_reason,
            stop_reason=state.stop_reason,
            prompt_token_ids=list(state.prompt_ids),
            logprobs=None if state.params.logprobs is None else state.logprobs,
            metrics=metrics,
        )

    def start(self, prompt: Prompt, params: SamplingParams | None = None) -> SequenceState:
        """A sequence whose pieces ``pieces`` gives and whose output ``output`` gives at the end."""
        return self._start(self._encode(prompt), self._resolve(params), self._caches(1)[0])

    def pieces(self, state: SequenceState) -> Iterator[Piece]:
        """The pieces of a sequence until it ends."""
        model = self.model
        text = self._prefill(state)
        while state.finish_reason is None:
            if text:
                yield state.piece(text)
            started = time.perf_counter()
            logits = model.decode(state.cache, state.token_ids[-1])
            text = state.take(logits, 1000 * (time.perf_counter() - started))
        yield state.piece(text)

    def _prefill(self, state: SequenceState) -> str:
        """The first forward pass: all of the prompt that the cache does not hold."""
        started = time.perf_counter()
        logits = self.model.prefill(state.cache, state.prompt_ids[state.cached_tokens :])
        return state.take(logits[0], 1000 * (time.perf_counter() - started))

    def _outputs(self, prompts: Sequence[Prompt], params: SamplingParams | None) -> list[Output]:
        if not prompts:
            return []
        resolved = self._resolve(params)
        encoded = [self._encode(prompt) for prompt in prompts]  # all are checked before work begins
        outputs: list[Output | None] = [None] * len(prompts)
        for first in range(0, len(prompts), MAX_BATCH):
            batch = encoded[first : first + MAX_BATCH]
            caches, shared = self._batch_caches(batch)
            states = [
                self._start(ids, resolved, cache, shared) for ids, cache in zip(batch, caches, strict=True)
            ]
            for state in states:
                self._prefill(state)
            while active := [s for s in states if s.finish_reason is None]:
                started = time.perf_counter()
                logits = self.model.decode_batch([s.cache for s in active], [s.token_ids[-1] for s in active])
                milliseconds = 1000 * (time.perf_counter() - started)
                for state, row in zip(active, logits, strict=True):
                    state.take(row, milliseconds)
            for i, state in enumerate(states, first):
                outputs[i] = self.output(state)
        return [output for output in outputs if output is not None]

    def _batch_caches(self, prompts: Sequence[Sequence[int]]) -> tuple[list[Cache], int]:
        """A cache for each prompt, and how many first tokens all of them hold already."""
        if self.kv != "paged" or len(prompts) == 1:
            return self._caches(len(prompts)), 0
        pool = self._pool(len(prompts))
        # The last token of a prompt is always run: its logits are needed.
        shared = min(_common(prompts), min(map(len, prompts)) - 1)
        if shared == 0:
            return [pool.new_cache() for _ in prompts], 0
        first = pool.new_cache()
        self.model.prefill(first, prompts[0][:shared])
        return [first.fork() for _ in prompts], shared

    def _caches(self, count: int) -> list[Cache]:
        if self.kv == "paged":
            pool = self._pool(count)
            return [pool.new_cache() for _ in range(count)]
        return [self.model.new_cache(self.kv, kv_dtype=self.kv_dtype) for _ in range(count)]

    def _pool(self, sequences: int) -> Pool:
        # Room for all contexts at their longest, and a block each for copies on write; blocks take
        # memory when they are used.
        blocks = sequences * (-(-self.max_context // BLOCK_ROWS) + 1)
        return self.model.new_pool(blocks, block_rows=BLOCK_ROWS, kv_dtype=self.kv_dtype)

    def _start(
        self, ids: Sequence[int], params: SamplingParams, cache: Cache, cached_tokens: int = 0
    ) -> SequenceState:
        return SequenceState(
            prompt_ids=ids,
            params=params,
            tokenizer=self.tokenizer,
            end_ids=self.eos_token_ids,
            context=self.max_context,
            cache=cache,
            cached_tokens=cached_tokens,
        )

    def _resolve(self, params: SamplingParams | None) -> SamplingParams:
        return (params or SamplingParams()).resolved(self.generation_config)

    def _encode(self, prompt: Prompt) -> list[int]:
        vocab = int(self.config["vocab_size"])
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else [_token_id(t) for t in prompt]
        if not ids:
            raise ValueError("the prompt is empty")
        for token in ids:
            if not 0 <= token < vocab:
                raise ValueError(f"token id {token} is outside the vocabulary of {vocab}")
        if len(ids) > self.max_context:
            raise ValueError(f"the prompt has {len(ids)} tokens, more than the context of {self.max_context}")
        return ids


def _token_id(value: Any) -> int:
    try:
        return operator.index(value)  # numpy's integers too
    except TypeError:
        raise ValueError(f"{value!r} is not a token id") from None


def _common(prompts: Sequence[Sequence[int]]) -> int:
    """How many first tokens all prompts have in common."""
    columns = zip(*prompts, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda column: len(set(column)) == 1, columns))
