"""The generation loop that all calls of an ``LLM`` share, and the engine beneath it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from qwen_rs import LLM, CacheError, Output, SamplingParams

PROMPTS = [[(7 * i + 13 * j) % 4000 for j in range(1 + i % 29)] for i in range(60)]


def same(one: Output, other: Output) -> bool:
    return (one.token_ids, one.text, one.logprobs, one.finish_reason) == (
        other.token_ids,
        other.text,
        other.logprobs,
        other.finish_reason,
    )


@pytest.fixture(scope="module")
def alone() -> Callable[[int], Output]:
    llm = LLM("demo", threads=1)
    return lambda i: llm.generate(PROMPTS[i], params(i))


def params(i: int) -> SamplingParams:
    bias = {i: 2.0} if i % 3 == 0 else None
    return SamplingParams(max_tokens=1 + i % 17, seed=i, temperature=i % 2, logprobs=i % 3, logit_bias=bias)


@pytest.mark.parametrize("kv", ["basic", "paged", "concat"])
def test_a_long_list_is_what_each_gives_alone(kv: str, alone: Callable[[int], Output]) -> None:
    llm = LLM("demo", kv=kv, threads=2, max_num_seqs=7)
    outputs = llm.generate(PROMPTS, [params(i) for i in range(len(PROMPTS))])
    assert all(same(output, alone(i)) for i, output in enumerate(outputs))
    counters = llm.generation.engine.counters()
    assert counters["running"] == counters["waiting"] == 0


def test_threads_share_the_loop_and_each_gets_its_own(alone: Callable[[int], Output]) -> None:
    llm = LLM("demo", kv="paged", threads=2)
    results: dict[int, Any] = {}

    def run(i: int) -> None:
        if i % 2:
            results[i] = llm.generate(PROMPTS[i], params(i))
        else:
            results[i] = list(llm.stream(PROMPTS[i], params(i)))

    for _ in range(3):
        threads = [threading.Thread(target=run, args=(i,)) for i in range(24)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for i, result in results.items():
            if i % 2:
                assert same(result, alone(i))
            else:
                assert "".join(piece.text for piece in result) == alone(i).text
                assert [t for piece in result for t in piece.token_ids] == alone(i).token_ids
                reasons = [piece.finish_reason for piece in result]
                assert reasons[-1] == alone(i).finish_reason and set(reasons[:-1]) <= {None}


def test_a_failure_is_its_own_sequences_and_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when somebody else was waited for when it came."""
    llm = LLM("demo", threads=1)
    texts = (
        llm._sequence([5, 6], SamplingParams(max_tokens=30).resolved({})),
        llm._sequence([7, 8], SamplingParams(max_tokens=30).resolved({})),
    )
    monkeypatch.setattr(texts[1]._decoder, "push", lambda token: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        list(llm.generation.finish(list(texts)))
    assert texts[0].error is None
    llm.generation.step(0.0)
    assert llm.generation.engine.counters()["running"] == 0
    failing = llm._sequence([7, 8], SamplingParams(max_tokens=30).resolved({}))
    monkeypatch.setattr(failing._decoder, "push", lambda token: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        list(llm.pieces(failing))


def test_a_dropped_stream_leaves_nothing_running() -> None:
    llm = LLM("demo", kv="paged", threads=1)
    stream = llm.stream("Emma", SamplingParams(max_tokens=500, ignore_eos=True))
    next(stream)
    assert llm.generation.engine.counters()["running"] == 1
    stream.close()  # type: ignore[attr-defined]
    llm.generation.step(0.0)
    assert llm.generation.engine.counters()["running"] == 0


def test_a_small_cache_preempts_and_changes_nothing(alone: Callable[[int], Output]) -> None:
    block = LLM("demo").model.new_pool(1).block_bytes
    llm = LLM("demo", kv="paged", threads=1, kv_memory=6 * block)
    settings = [SamplingParams(max_tokens=150, seed=i, ignore_eos=True) for i in range(6)]
    outputs = llm.generate(PROMPTS[:6], settings)
    assert llm.generation.engine.counters()["preemptions"] > 0
    free = LLM("demo", threads=1)
    assert all(same(o, free.generate(p, s)) for o, p, s in zip(outputs, PROMPTS, settings, strict=False))
    with pytest.raises(CacheError, match="needs room for 409 tokens, and the KV cache has 320"):
        llm.generate([1] * 10, SamplingParams(max_tokens=400))
