"""A user's program that touches every public name; ``mypy --strict`` checks it, and a test runs it."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import qwen_rs
from qwen_rs import (
    LLM,
    Cache,
    CacheError,
    ChatOutput,
    ChatPrompt,
    ChatTemplate,
    Message,
    Metrics,
    Model,
    ModelError,
    Output,
    Piece,
    Pool,
    Sampler,
    SamplingParams,
    Tokenizer,
    available_isas,
    default_threads,
    load_snapshot,
    quantize_q8_0,
    save_snapshot,
)


def high_level(llm: LLM) -> list[int]:
    params: SamplingParams = SamplingParams(max_tokens=4, temperature=0.7, top_k=20, seed=1, logprobs=2)
    output: Output = llm.generate("Emma", params)
    several: list[Output] = llm.generate(["Emma", "Mr. Darcy"], params)
    by_ids: Output = llm.generate([5, 6, 7], params)
    metrics: Metrics = output.metrics
    speed: float | None = metrics.decode_tokens_per_second
    logprobs: list[dict[int, float]] | None = output.logprobs
    pieces: list[Piece] = list(llm.stream("Emma", params))
    text: str = "".join(piece.text for piece in pieces)
    assert text == output.text == several[0].text and speed is not None and logprobs is not None
    return output.token_ids + by_ids.token_ids


async def asynchronous(llm: LLM) -> str:
    return "".join([piece.text async for piece in llm.astream("Emma", SamplingParams(max_tokens=4))])


def chat(llm: LLM) -> str:
    messages: list[Message] = [{"role": "user", "content": "Hello"}]
    template: ChatTemplate = ChatTemplate("{{ messages[0].content }}", {}, "here")
    assert llm.chat_template is None
    try:
        answer: ChatOutput = llm.chat(messages, enable_thinking=False)
    except ValueError:  # the demo has no template
        prompt: ChatPrompt = template.prompt(messages, llm.tokenizer)
        assert prompt.token_ids == llm.tokenizer.encode("Hello", special_tokens=False)
        return template.render(messages)
    return answer.content


def low_level(directory: Path) -> NDArray[np.float32]:
    model: Model = Model.load(directory, dtype="q8_0", threads=default_threads())
    cache: Cache = model.new_cache("basic", kv_dtype="f16")
    tokenizer: Tokenizer = Tokenizer(directory)
    logits: NDArray[np.float32] = model.prefill(cache, tokenizer.encode("Emma"))[0]
    sampler: Sampler = Sampler(temperature=0.0)
    token: int = sampler.sample(logits)
    pool: Pool = model.new_pool(8, block_rows=16)
    paged: Cache = pool.new_cache()
    model.prefill(paged, [1, 2, 3])
    both: NDArray[np.float32] = model.decode_batch([cache, paged], [token, 4])
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "prompt.safetensors"
        save_snapshot(path, model, cache)
        again: Cache = model.new_cache(kv_dtype="f16")
        load_snapshot(path, model, again)
    try:
        model.prefill(pool.new_cache(), [1] * 500)
    except CacheError as error:
        assert "exhausted" in str(error)
    try:
        Model.load(directory.parent)
    except (ModelError, OSError) as error:
        assert "config.json" in str(error)
    blocks: NDArray[np.uint8] = quantize_q8_0(np.zeros(32, np.float32))
    assert blocks.nbytes == 34 and again.seq_len == cache.seq_len
    return both


def main() -> None:
    isas: list[str] = available_isas()
    with LLM("demo") as llm:
        ids: list[int] = high_level(llm)
        text: str = asyncio.run(asynchronous(llm))
        answer: str = chat(llm)
        logits: NDArray[np.float32] = low_level(llm.directory)
    print(qwen_rs.__version__, isas[-1], len(ids), len(text) > 0, answer, logits.shape)


if __name__ == "__main__":
    main()
