"""``LLM``: a checkpoint, its tokenizer, and the generation loop."""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, cast, overload

from .._core import Engine, Model
from ..checkpoint.chat_template import ChatPrompt, ChatTemplate, Message
from ..checkpoint.reasoning import split_reasoning
from ..checkpoint.source import end_of_sequence_ids, generation_config, resolve
from ..checkpoint.tokenizer import Tokenizer
from .arguments import checked_keywords, one_of, shown, whole
from .conversations import as_conversation, as_conversations, refuse_unread_roles
from .generation import Generation
from .memory import pool_blocks
from .metrics import Metrics
from .options import BACKENDS, BLOCK_ROWS, DTYPES, KV, KV_DTYPES, MAX_BATCH
from .outputs import ChatOutput, Output, Piece
from .prompts import Prompt, as_list, check_ids, token_ids
from .sampling_params import SamplingParams
from .sequence import SequenceState

Params = SamplingParams | Sequence[SamplingParams] | None
"""Settings of all prompts, or of each."""


class LLM:
    """A Qwen3 model, ready to generate.

    Args:
        model: ``"demo"`` (the bundled model), a checkpoint directory, or a hub id.
        dtype: how weights are kept, one of ``options.DTYPES``.
        kv: the KV cache: ``basic`` (zero-copy), ``paged`` (prompts that begin alike share storage) or
            ``concat`` (the copying baseline).
        kv_dtype: what the cache stores: ``f32`` or ``f16``.
        backend: ``simd`` (the best kernels, all threads) or ``scalar`` (portable kernels, one thread).
        threads: worker threads; None: as many as this process may use.
        max_context: the most tokens of prompt and output together, the last token generated included;
            None: what the model allows.
        max_num_seqs: sequences that are generated together at most; others wait.
        kv_memory: bytes for the blocks of a paged cache; None: as much as ``max_num_seqs`` contexts take,
            at most half of the memory that is free.
        step_goal_ms: what a step should take at most while sequences wait for their next token: long prompts
            are cut into chunks for it. None: chunks are as long as a pass takes them.
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
        dtype: str = DTYPES[0],
        kv: str = KV[0],
        kv_dtype: str = KV_DTYPES[0],
        backend: str = BACKENDS[0],
        threads: int | None = None,
        max_context: int | None = None,
        max_num_seqs: int = MAX_BATCH,
        kv_memory: int | None = None,
        step_goal_ms: float | None = None,
        progress: Callable[[float], object] | None = None,
    ) -> None:
        one_of("dtype", dtype, DTYPES)
        one_of("kv", kv, KV)
        one_of("kv_dtype", kv_dtype, KV_DTYPES)
        one_of("backend", backend, BACKENDS)
        threads = None if threads is None else whole("threads", threads, 1)
        max_context = None if max_context is None else whole("max_context", max_context, 1)
        self.max_num_seqs = whole("max_num_seqs", max_num_seqs, 1)
        kv_memory = None if kv_memory is None else whole("kv_memory", kv_memory, 1)
        if kv_memory is not None and kv != "paged":
            raise ValueError(f"kv_memory sizes a paged cache, and kv is {kv}")
        if backend == "scalar" and threads not in (None, 1):
            raise ValueError(f"the scalar backend has one thread, not {threads}")
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
        # An id outside the vocabulary can be in a config, and ends nothing.
        vocab_size = int(self.config["vocab_size"])
        self._end_ids = frozenset(i for i in self.eos_token_ids if 0 <= i < vocab_size)
        self.kv, self.kv_dtype = kv, kv_dtype
        most = int(self.config["max_position_embeddings"])
        if max_context is not None and max_context > most:
            raise ValueError(f"max_context must be 1 to {most}, not {max_context}")
        self.max_context = most if max_context is None else max_context
        self._kv_memory, self._step_goal_ms = kv_memory, step_goal_ms
        self._generation: Generation | None = self._new_generation()
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
        self._model = self._generation = None

    @property
    def generation(self) -> Generation:
        """The loop that all calls share; a forked child has one of its own, and so has a signal handler
        that interrupts a step.

        Raises:
            ValueError: the LLM is closed.
        """
        if self._generation is None or self._model is None:
            raise ValueError("the LLM is closed")
        if self._generation.process != os.getpid():
            self._generation = self._new_generation()
        return self._new_generation() if self._generation.leads else self._generation

    def _new_generation(self) -> Generation:
        model = self.model
        blocks = 1
        if self.kv == "paged":
            most = self.max_num_seqs * (-(-self.max_context // BLOCK_ROWS) + 1)
            block = model.new_pool(1, block_rows=BLOCK_ROWS, kv_dtype=self.kv_dtype)
            blocks = pool_blocks(block.block_bytes, self._kv_memory, most)
        return Generation(
            Engine(
                model,
                kv=self.kv,
                kv_dtype=self.kv_dtype,
                num_blocks=blocks,
                block_rows=BLOCK_ROWS,
                max_num_seqs=self.max_num_seqs,
                step_goal_ms=self._step_goal_ms,
            )
        )

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
    def generate(self, prompts: str | Sequence[int], params: Params = None) -> Output: ...
    @overload
    def generate(self, prompts: list[str] | list[list[int]], params: Params = None) -> list[Output]: ...

    def generate(self, prompts: Any, params: Params = None) -> Output | list[Output]:
        """Generates from a prompt, or from a list of prompts together.

        A prompt is text or token ids (a list, a tuple, a range or a NumPy array). Each output of a list
        is bit-identical to that of its prompt alone: with a seed, prompts that are the same have the
        same output; without one, each draws for itself.

        Args:
            prompts: a prompt, or a list of them; an empty list gives an empty list.
            params: settings of all prompts, or a list with those of each.

        Returns:
            An output, or a list of one for each prompt. Where ``n`` is above 1, a list of n outputs
            stands in place of the one: the first is what ``n=1`` gives for the same seed. (No type says
            so, as ``n`` is a value: ``isinstance(outputs, list)`` tells a type checker.)

        Raises:
            ValueError: a prompt is none, is empty, has an id outside the vocabulary, or leaves no room
                in the context; there are not as many params as prompts.
            TypeError: params are no :class:`SamplingParams`.
            CacheError: the cache has no room.
            ModelError: ``generation_config.json`` has a value that cannot be used.

        >>> llm = LLM("demo")
        >>> params = SamplingParams(max_tokens=5, seed=1)
        >>> one, two = llm.generate(["Emma", "Mr. Darcy"], params)
        >>> one.token_ids == llm.generate("Emma", params).token_ids
        True
        >>> first, second = llm.generate("Emma", SamplingParams(max_tokens=5, seed=1, n=2))
        >>> first.token_ids == one.token_ids, second.token_ids == one.token_ids
        (True, False)
        >>> llm.generate("")
        Traceback (most recent call last):
        ValueError: the prompt is empty
        """
        listed, single = as_list(prompts)
        outputs = self._outputs(listed, params)
        return outputs[0] if single else outputs

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Piece]:
        """Generates piece by piece: whole characters as soon as they are complete.

        The pieces' texts joined are the text that ``generate`` gives. A stream may be dropped at any
        time.

        Raises:
            as ``generate``, before the first piece; ValueError too for ``n`` above 1.

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

    @overload
    def chat(
        self,
        messages: Sequence[Message],
        params: Params = None,
        *,
        enable_thinking: bool | None = None,
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> ChatOutput: ...
    @overload
    def chat(
        self,
        messages: Sequence[Sequence[Message]],
        params: Params = None,
        *,
        enable_thinking: bool | None = None,
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> list[ChatOutput]: ...

    @checked_keywords
    def chat(
        self,
        messages: Any,
        params: Params = None,
        *,
        enable_thinking: bool | None = None,
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> ChatOutput | list[ChatOutput]:
        """Answers a conversation, or a list of conversations together, through the chat template.

        What the messages and tools say is text, even where it spells out a control token.

        Args:
            messages: turns with ``role`` and ``content``, which is text or a list of text parts
                (``{"type": "text", "text": ...}``, joined by line ends); or a list of such lists.
            params: as for ``generate``.
            enable_thinking: the template's thinking switch; None leaves it to the template.
            tools: descriptions of functions that the model may call.

        Returns:
            An answer, or a list of one for each conversation; ``n`` as for ``generate``.

        Raises:
            ValueError: the checkpoint has no template, the template refuses the messages or leaves
                out those of a role; and as ``generate``.
        """
        conversations, single = as_conversations(messages)
        prompts = [self.chat_prompt(c, enable_thinking=enable_thinking, tools=tools) for c in conversations]
        outputs = self._outputs([prompt.token_ids for prompt in prompts], params)
        answers = [
            cast(ChatOutput, [_answer(prompt, o) for o in output])
            if isinstance(output, list)
            else _answer(prompt, output)
            for prompt, output in zip(prompts, outputs, strict=True)
        ]
        return answers[0] if single else answers

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        enable_thinking: bool | None = None,
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> str:
        """The text of the prompt that ``chat`` generates from, of one conversation.

        Raises:
            ValueError: as ``chat``.
        """
        return self.chat_prompt(messages, enable_thinking=enable_thinking, tools=tools).text

    def chat_prompt(
        self,
        messages: Sequence[Message],
        *,
        enable_thinking: bool | None = None,
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> ChatPrompt:
        """The prompt that ``chat`` generates from, in tokens too, of one conversation.

        Raises:
            ValueError: as ``chat``.
        """
        if self.chat_template is None:
            raise ValueError(f"{self.directory}: the checkpoint has no chat template")
        conversation, template = as_conversation(messages), self.chat_template
        switches: dict[str, Any] = {"enable_thinking": enable_thinking, "tools": tools}
        refuse_unread_roles(functools.partial(template.render, **switches), conversation)
        return template.prompt(conversation, self.tokenizer, **switches)

    def start(self, prompt: Prompt, params: SamplingParams | None = None) -> SequenceState:
        """A sequence whose pieces ``pieces`` gives and whose output ``output`` gives at the end.

        Raises:
            as ``stream``.
        """
        (own,) = self._params_of_each(params, 1)
        if own.n != 1:
            raise ValueError(f"a stream is one sequence: n must be 1, not {own.n}")
        return self._sequence(self._encode(prompt), self._resolved(own, 0))

    def sequences(self, prompt: Prompt, params: SamplingParams) -> list[SequenceState]:
        """The ``n`` sequences of a prompt, not submitted yet.

        Raises:
            as ``generate``.
        """
        ids = self._encode(prompt)
        return [self._sequence(ids, self._resolved(params, choice)) for choice in range(params.n or 1)]

    def pieces(self, sequence: SequenceState) -> Iterator[Piece]:
        """The pieces of a sequence until it ends."""
        return self.generation.pieces(sequence)

    def output(self, sequence: SequenceState) -> Output:
        """The output of a sequence that has ended."""
        assert sequence.finish_reason is not None and sequence.params.seed is not None
        model = self.model
        metrics = Metrics(
            backend=model.backend,
            isa=model.isa,
            threads=model.threads,
            dtype=model.dtype,
            kv_cache=self.kv,
            kv_dtype=self.kv_dtype,
            forward_ms=tuple(sequence.forward_ms),
            prompt_tokens=len(sequence.prompt_ids),
            cached_tokens=sequence.cached_tokens,
            generated_tokens=len(sequence.token_ids),
            finish_reason=sequence.finish_reason,
            load_ms=self.load_ms,
            weight_bytes=model.weight_bytes,
            kv_bytes=sequence.kv_bytes,
            seed=sequence.params.seed,
        )
        return Output(
            text=sequence.text,
            token_ids=sequence.token_ids,
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
            prompt_token_ids=list(sequence.prompt_ids),
            logprobs=None if sequence.params.logprobs is None else sequence.logprobs,
            metrics=metrics,
        )

    def _outputs(self, prompts: Sequence[Prompt], params: Params) -> list[Output]:
        """For each prompt its output; where ``n`` is above 1 a list of n, as ``generate`` says."""
        each = self._params_of_each(params, len(prompts))
        encoded = [self._encode(prompt) for prompt in prompts]  # all are checked before work begins
        for own in each:
            self._resolved(own, 0)
        sequences = [s for ids, own in zip(encoded, each, strict=True) for s in self.sequences(ids, own)]
        flat = [self.output(sequence) for sequence in self.generation.finish(sequences)]
        outputs = iter(flat)
        return [
            next(outputs) if own.n == 1 else cast(Output, list(itertools.islice(outputs, own.n or 1)))
            for own in each
        ]

    def _sequence(self, ids: list[int], params: SamplingParams) -> SequenceState:
        return SequenceState(
            prompt_ids=ids,
            params=params,
            tokenizer=self.tokenizer,
            end_ids=self._end_ids,
            max_context=self.max_context,
        )

    def _params_of_each(self, params: Any, prompts: int) -> list[SamplingParams]:
        listed = isinstance(params, list | tuple)
        for own in params if listed else [params]:
            if not isinstance(own, SamplingParams | None):
                raise TypeError(f"params must be SamplingParams or a list of them, not {shown(own)}")
        if listed and len(params) != prompts:
            raise ValueError(f"{len(params)} params for {prompts} prompts")
        each = params if listed else [params] * prompts
        return [SamplingParams() if own is None else own for own in each]

    def _resolved(self, params: SamplingParams, choice: int) -> SamplingParams:
        try:
            check_ids(list(params.stop_token_ids or ()), int(self.config["vocab_size"]))
        except ValueError as error:
            raise ValueError(f"stop_token_ids: {error}") from None
        where = str(self.directory / "generation_config.json")
        return params.resolved(self.generation_config, where, choice=choice)

    def _encode(self, prompt: Any) -> list[int]:
        vocab_size = int(self.config["vocab_size"])
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt)
            check_ids(ids, vocab_size)
        else:
            ids = token_ids(prompt, vocab_size)
        if not ids:
            raise ValueError("the prompt is empty")
        if len(ids) >= self.max_context:
            raise ValueError(
                f"the prompt has {len(ids)} tokens and leaves no room in the context of {self.max_context}"
            )
        return ids


def _answer(prompt: ChatPrompt, output: Output) -> ChatOutput:
    reasoning, content = split_reasoning(output.text, opened=prompt.thinking)
    return ChatOutput(**vars(output), reasoning=reasoning, content=content)
