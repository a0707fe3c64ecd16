"""What a server serves: the model, its name, and how requests become sequences."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import time
from collections.abc import Callable
from typing import TypeVar

from .. import __version__
from ..checkpoint.reasoning import TAGS
from ..engine.llm import LLM
from ..engine.options import BLOCK_ROWS
from ..engine.prompts import check_ids
from ..engine.sampling_params import SamplingParams
from ..engine.sequence import SequenceState
from .answer import Answer
from .errors import RequestError
from .forms import ChatForm, CompletionForm, Form
from .options import Options
from .protocol import ChatRequest, CompletionRequest, Sampling
from .structure import Structures
from .worker import Worker

COMPLETION_TOKENS = 16
"""OpenAI's default of ``max_tokens`` for plain completions; a chat's answer may fill the context."""
MAX_LOGPROBS = 20
"""OpenAI's limit of ``top_logprobs``."""
MAX_CHOICES = 128
Made = TypeVar("Made")


class Service:
    """A model that is being served.

    Args:
        llm: the model.
        options: of the server.
    """

    def __init__(self, llm: LLM, options: Options) -> None:
        self.llm, self.options = llm, options
        self.created = int(time.time())
        self.name = options.name
        self.worker = Worker(llm, self.name, max_queued=options.max_queued_requests)
        self.fingerprint = _fingerprint(llm)
        blocks = int(llm.generation.engine.counters()["blocks"])
        # The engine keeps a block free; the last token is never run.
        self.max_context = min(llm.max_context, (blocks - 1) * BLOCK_ROWS + 1)

    async def complete(self, request: CompletionRequest) -> Answer:
        """
        Raises:
            RequestError: the request is refused.
        """
        return self._answer(request, await _made(lambda: self._completion(request)))

    async def chat(self, request: ChatRequest) -> Answer:
        """
        Raises:
            RequestError: the request is refused.
        """
        return self._answer(request, await _made(lambda: self._chat(request)))

    def check_model(self, name: str | None) -> None:
        """
        Raises:
            RequestError: another model is asked for.
        """
        if name is not None and name != self.name:
            raise RequestError(404, f"the model {name!r} is not served; {self.name!r} is", param="model")

    def _answer(self, request: Sampling, form: Form) -> Answer:
        return Answer(
            self.worker,
            self.worker.submit(list(form.sequences)),
            form,
            stream=bool(request.stream),
            include_usage=request.include_usage,
            timeout=self.options.request_timeout,
        )

    def _completion(self, request: CompletionRequest) -> Form:
        self._check(request)
        _check_logprobs("logprobs", request.logprobs)
        listed = request.prompts
        wanted = COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
        silent = wanted == 0 and bool(request.echo)  # only the prompt's log probabilities are asked for
        params = request.sampling(max_tokens=1 if silent else wanted, logprobs=request.logprobs)
        prompt_logprobs = request.logprobs if request.echo else None
        sequences: list[SequenceState] = []
        for prompt in listed:
            sequences += self._sequences(request, prompt, params, "prompt", prompt_logprobs)
        num_choices = params.n or 1
        echo = None
        if request.echo:
            firsts = sequences[::num_choices]
            decode = self.llm.tokenizer.decode
            echo = [
                prompt if isinstance(prompt, str) else decode(own.prompt_ids, skip_special_tokens=False)
                for prompt, own in zip(listed, firsts, strict=True)
            ]
        return CompletionForm(
            echo=echo,
            generated=not silent,
            model=self.name,
            fingerprint=self.fingerprint,
            tokenizer=self.llm.tokenizer,
            sequences=sequences,
            num_choices=num_choices,
        )

    def _chat(self, request: ChatRequest) -> Form:
        self._check(request)
        _check_logprobs("top_logprobs", request.top_logprobs)
        if request.top_logprobs is not None and not request.logprobs:
            raise RequestError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        try:
            prompt = self.llm.chat_prompt(request.messages, enable_thinking=request.enable_thinking)
        except ValueError as error:
            raise RequestError(400, str(error), param="messages") from None
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
        most = request.most_tokens
        if most is None:
            most = max(self.max_context - len(prompt.token_ids), 1)
        params = request.sampling(max_tokens=most, logprobs=logprobs)
        sequences = self._sequences(request, prompt.token_ids, params, "messages")
        if (wanted := request.schema) is not None:
            grammar = self.structures.schema(*wanted)
            may_think = request.enable_thinking is not False and not prompt.text.rstrip().endswith(TAGS[1])
            for sequence in sequences:
                sequence.constraint = self.structures.constraint(
                    grammar, opened=prompt.thinking, may_think=may_think and not prompt.thinking
                )
        return ChatForm(
            opened=prompt.thinking,
            logprobs=bool(request.logprobs),
            model=self.name,
            fingerprint=self.fingerprint,
            tokenizer=self.llm.tokenizer,
            sequences=sequences,
            num_choices=params.n or 1,
        )

    @functools.cached_property
    def structures(self) -> Structures:
        """Made when the first structured answer is asked for."""
        llm = self.llm
        vocab_size = int(llm.config["vocab_size"])
        ends = [token for token in llm.eos_token_ids if 0 <= token < vocab_size]
        return Structures(llm.directory, llm.tokenizer, vocab_size, ends)

    def _check(self, request: Sampling) -> None:
        self.check_model(request.model)
        if request.stream_options is not None and not request.stream:
            raise RequestError(400, "stream_options needs stream: true", param="stream_options")
        if request.n is not None and request.n > MAX_CHOICES:
            raise RequestError(400, f"n must be at most {MAX_CHOICES}, not {request.n}", param="n")
        try:
            check_ids([int(token) for token in request.logit_bias or {}], int(self.llm.config["vocab_size"]))
        except ValueError as error:
            raise RequestError(400, f"logit_bias: {error}", param="logit_bias") from None
        if request.priority is not None and not -(1 << 31) <= request.priority < 1 << 31:
            raise RequestError(400, "priority must be a 32-bit number", param="priority")

    def _sequences(
        self,
        request: Sampling,
        prompt: str | list[int],
        params: SamplingParams,
        field: str,
        prompt_logprobs: int | None = None,
    ) -> list[SequenceState]:
        """The sequences of a prompt: ``n`` of them."""
        try:
            sequences = self.llm.sequences(prompt, params)
        except ValueError as error:
            named = str(error).partition(":")[0]
            raise RequestError(400, str(error), param=named if named in vars(params) else field) from None
        for sequence in sequences:
            sequence.priority, sequence.salt = request.priority or 0, request.cache_salt or ""
            sequence.prompt_logprobs_wanted = prompt_logprobs
        return sequences


async def _made(make: Callable[[], Made]) -> Made:
    """Tokenizing and templates take a while: not in the way of everybody's streams."""
    return await asyncio.to_thread(make)


def _check_logprobs(field: str, value: int | None) -> None:
    if value is not None and not 0 <= value <= MAX_LOGPROBS:
        raise RequestError(400, f"{field} must be 0 to {MAX_LOGPROBS}, not {value}", param=field)


def _fingerprint(llm: LLM) -> str:
    """Of all that decides over the bits: the config, the files of weights by name and size, the dtypes and
    the program's version."""
    directory = llm.directory
    files = sorted(directory.iterdir()) if directory.is_dir() else [directory]
    sizes = [(file.name, file.stat().st_size) for file in files if file.is_file()]
    parts = [__version__, llm.config, sizes, llm.model.dtype, llm.kv_dtype]
    return "fp_" + hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
