"""The library's surface: arguments, logprobs, asyncio, snapshots on disk, threads, fork."""

from __future__ import annotations

import asyncio
import doctest
import importlib
import json
import multiprocessing
import os
import pickle
import pkgutil
import re
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from conftest import DEMO, GOLDEN

import qwen_rs
from qwen_rs import LLM, CacheError, Model, ModelError, SamplingParams, load_snapshot, save_snapshot

GREEDY = SamplingParams(max_tokens=16, temperature=0)


@pytest.mark.parametrize(
    ("call", "near"),
    [
        (lambda: SamplingParams(temprature=1), "temperature"),  # type: ignore[call-arg]
        (lambda: SamplingParams(max_new_tokens=1), "max_tokens"),  # type: ignore[call-arg]
        (lambda: LLM("demo", kv_type="f16"), "kv_dtype"),  # type: ignore[call-arg]
        (lambda: LLM("demo", n_threads=2), "threads"),  # type: ignore[call-arg]
    ],
)
def test_an_unknown_argument_names_the_nearest(call: object, near: str) -> None:
    with pytest.raises(TypeError, match=f"did you mean '{near}'"):
        call()  # type: ignore[operator]


def test_logprobs_are_those_of_the_softmax(demo: LLM) -> None:
    output = demo.generate("Emma", SamplingParams(max_tokens=5, seed=2, logprobs=3))
    assert output.logprobs is not None and len(output.logprobs) == 5
    model, cache = demo.model, demo.model.new_cache()
    logits = model.prefill(cache, output.prompt_token_ids)[0]
    for token, logprobs in zip(output.token_ids, output.logprobs, strict=True):
        x = logits.astype(np.float64)
        expected = x - x.max() - np.log(np.exp(x - x.max()).sum())
        top = np.argsort(-expected, kind="stable")[:3]
        assert set(logprobs) == {*top.tolist(), token}
        assert all(p == pytest.approx(expected[i], abs=1e-9) for i, p in logprobs.items())
        assert list(logprobs.values()) == sorted(logprobs.values(), reverse=True)
        logits = model.decode(cache, token)
    assert demo.generate("Emma", GREEDY).logprobs is None


def test_async_streams_run_side_by_side(demo: LLM) -> None:
    prompts = ["Emma", "Mr. Darcy", "The weather"]

    async def text(prompt: str) -> str:
        return "".join([piece.text async for piece in demo.astream(prompt, GREEDY)])

    async def all_texts() -> list[str]:
        return await asyncio.gather(*(text(prompt) for prompt in prompts))

    assert asyncio.run(all_texts()) == [demo.generate(prompt, GREEDY).text for prompt in prompts]


def test_sixteen_threads_sharing_an_llm_give_what_one_gives(demo: LLM) -> None:
    prompts = [list(range(5 + i, 40 + 2 * i)) for i in range(16)]
    expected = [demo.generate(prompt, GREEDY).token_ids for prompt in prompts]
    results: list[list[int] | None] = [None] * 16

    def work(i: int) -> None:
        for _ in range(3):
            results[i] = demo.generate(prompts[i], GREEDY).token_ids

    threads = [threading.Thread(target=work, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == expected


def test_a_stream_that_is_dropped_leaves_a_usable_model(demo: LLM) -> None:
    expected = demo.generate("Emma", GREEDY).token_ids
    for _ in range(5):
        stream = demo.stream("Emma", GREEDY)
        next(stream)
        stream.close()  # type: ignore[attr-defined]
    assert demo.generate("Emma", GREEDY).token_ids == expected


def test_snapshots_go_through_a_file(tmp_path: Path, demo: LLM) -> None:
    model = demo.model
    for kv_dtype in ("f32", "f16"):
        cache = model.new_cache(kv_dtype=kv_dtype)
        model.prefill(cache, list(range(300)))
        path = tmp_path / "prompt.safetensors"
        save_snapshot(path, model, cache)
        assert [p.name for p in tmp_path.iterdir()] == [path.name]
        again = model.new_cache(kv_dtype=kv_dtype)
        load_snapshot(path, model, again)
        assert np.array_equal(model.decode(cache, 7), model.decode(again, 7))
    with pytest.raises(CacheError, match="empty cache"):
        load_snapshot(path, model, again)
    for other in (Model.load(DEMO, dtype="f32"), Model.load(GOLDEN / "gqa_4_1")):
        with pytest.raises(ModelError, match="another model"):
            load_snapshot(path, other, other.new_cache())
    with pytest.raises(ValueError, match="empty"):
        save_snapshot(path, model, model.new_cache())
    with pytest.raises(OSError):
        save_snapshot(tmp_path / "no" / "such", model, cache)


@pytest.mark.parametrize("keep", [0, 7, 100, 5000, -1])
def test_a_broken_snapshot_is_refused_and_the_cache_stays_empty(tmp_path: Path, demo: LLM, keep: int) -> None:
    model, cache = demo.model, demo.model.new_cache()
    model.prefill(cache, [1, 2, 3])
    path = tmp_path / "s"
    save_snapshot(path, model, cache)
    path.write_bytes(path.read_bytes()[:keep])
    fresh = model.new_cache()
    with pytest.raises(ModelError, match="snapshot"):
        load_snapshot(path, model, fresh)
    assert fresh.seq_len == 0
    with pytest.raises(FileNotFoundError):
        load_snapshot(tmp_path / "none", model, fresh)
    with pytest.raises(ModelError, match="not a qwen-rs snapshot"):
        load_snapshot(DEMO / "model.safetensors", model, fresh)


def _in_child(tokens: list[int], queue: multiprocessing.Queue[list[int]]) -> None:
    assert FORKED is not None
    queue.put(FORKED.generate(tokens, GREEDY).token_ids)


FORKED: LLM | None = None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_generates_the_same(demo: LLM) -> None:
    global FORKED
    FORKED = demo
    tokens = list(range(100, 130))
    context = multiprocessing.get_context("fork")
    queue: multiprocessing.Queue[list[int]] = context.Queue()
    child = context.Process(target=_in_child, args=(tokens, queue))
    child.start()
    result = queue.get(timeout=60)
    child.join(timeout=60)
    assert child.exitcode == 0 and result == demo.generate(tokens, GREEDY).token_ids


def test_a_model_cannot_be_pickled_and_says_so(demo: LLM) -> None:
    with pytest.raises(TypeError, match="pickle"):
        pickle.dumps(demo)
    params = SamplingParams(top_k=3, stop=["x"])
    assert pickle.loads(pickle.dumps(params)) == params


def test_the_interpreter_may_end_in_the_middle_of_a_stream() -> None:
    program = "from qwen_rs import LLM\nstream = LLM('demo').stream('Emma')\nprint(next(stream).text)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0 and result.stderr == "" and result.stdout


def test_memory_that_cannot_be_had_is_an_error_and_the_model_goes_on() -> None:
    program = """
import json, resource
from qwen_rs import LLM, CacheError, Model, SamplingParams
from qwen_rs.bench import SHAPES
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, resource.RLIM_INFINITY))
try:  # 633 MB of weights in 1 GiB of addresses, of which the libraries take some
    Model.random(json.dumps(SHAPES["0.6b"]), threads=1)
except MemoryError as error:
    assert "no memory for" in str(error)
else:
    raise AssertionError("loaded")
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
llm = LLM("demo", threads=1)
params = SamplingParams(max_tokens=4, temperature=0)
before = llm.generate("Emma", params).token_ids
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (8 << 20), resource.RLIM_INFINITY))
failed, held = 0, []
for _ in range(200):
    try:
        cache = llm.model.new_cache()
        llm.model.prefill(cache, [1] * 2000)
        held.append(cache)
    except (CacheError, MemoryError):
        failed += 1
held.clear()
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert failed > 0
assert llm.generate("Emma", params).token_ids == before
print("ok")
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert result.stdout == "ok\n", result.stderr


def test_the_readme_names_only_options_that_exist() -> None:
    readme = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
    command = [sys.executable, "-m", "qwen_rs"]
    known = "".join(
        subprocess.run([*command, name, "--help"], capture_output=True, text=True, check=True).stdout
        for name in ("generate", "bench")
    )
    named = set(re.findall(r"(?<=[\s`])--[a-z][a-z-]*", readme)) - {"--test"}  # cargo's
    assert len(named) > 10
    assert not [option for option in named if option not in known]


def test_prompts_may_be_numpy_arrays(demo: LLM) -> None:
    expected = demo.generate([5, 6, 7], GREEDY).token_ids
    assert demo.generate(np.array([5, 6, 7]), GREEDY).token_ids == expected  # type: ignore[arg-type]
    assert demo.generate([np.int64(5), 6, 7], GREEDY).token_ids == expected
    assert demo.generate(np.array([[5, 6, 7]]), GREEDY)[0].token_ids == expected  # type: ignore[arg-type,index]


def test_metrics_round_trip_as_json(demo: LLM) -> None:
    metrics = demo.generate("Emma", GREEDY).metrics
    assert json.loads(json.dumps(metrics.as_dict()))["generated_tokens"] == 16


def test_the_typed_program_uses_every_public_name_and_runs() -> None:
    """``.ci/run`` checks its types with ``mypy --strict``."""
    program = Path(__file__).with_name("typed_program.py")
    assert not [name for name in qwen_rs.__all__ if name not in program.read_text()]
    result = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split()[1:4] == ["portable", "8", "True"]


def test_the_examples_in_docstrings_are_true() -> None:
    names = [m.name for m in pkgutil.walk_packages(qwen_rs.__path__, "qwen_rs.")]
    modules = [importlib.import_module(name) for name in names]
    results = [doctest.testmod(module) for module in [qwen_rs, *modules]]
    assert sum(r.failed for r in results) == 0 and sum(r.attempted for r in results) >= 20


def test_every_public_name_is_documented() -> None:
    for name in qwen_rs.__all__:
        thing = getattr(qwen_rs, name)
        if name == "Message":
            continue  # an alias
        assert len(thing.__doc__ or "") > 40, name
        for member, value in vars(thing).items() if isinstance(thing, type) else ():
            if not member.startswith("_") and (callable(value) or isinstance(value, property)):
                assert getattr(value, "__doc__", None), f"{name}.{member}"
