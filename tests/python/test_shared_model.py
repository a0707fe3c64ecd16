"""Several users of one model, and what is left when a pass fails: threads, forks, signals, memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from checkpoints import config, write
from conftest import DEMO

from qwen_rs import LLM, CacheError, Model, ModelError, SamplingParams, load_snapshot, save_snapshot

GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
# Some hundred milliseconds a pass of 512 rows: long enough to come in the middle of one.
SHAPE = json.dumps(config(hidden_size=1024, intermediate_size=3072, num_hidden_layers=6))
LONG = [1 + i % 300 for i in range(8000)]


@pytest.fixture(scope="module")
def model() -> Model:
    return Model.random(SHAPE)


def run(program: str, timeout: float = 120) -> str:
    result = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path])},
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_14_a_child_forked_in_the_middle_of_any_pass_may_use_the_model(model: Model) -> None:
    expected = model.prefill(model.new_cache(), [1, 2, 3])
    done = threading.Event()

    def work() -> None:
        while not done.is_set():
            model.prefill(model.new_cache(), LONG[:1200])

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(5):
            time.sleep(0.05)
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    cache = model.new_cache()
                    same = np.array_equal(model.prefill(cache, [1, 2, 3]), expected)
                    model.decode(cache, 4)
                    status = 0 if same else 2
                finally:
                    os._exit(status)
            deadline = time.monotonic() + 30
            while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
                time.sleep(0.01)
            if ended == (0, 0):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                pytest.fail("the child hangs")
            assert ended[1] == 0
    finally:
        done.set()
        thread.join()


def test_15_a_long_prompt_and_other_streams_take_turns(model: Model) -> None:
    """Passes of both come in between each other, counted and not timed."""
    order: list[str] = []
    cache = model.new_cache()
    model.prefill(cache, [1, 2, 3])
    started = threading.Event()

    def prompt() -> None:
        started.set()
        model.prefill(model.new_cache(), LONG)
        order.append("prompt")

    thread = threading.Thread(target=prompt)
    thread.start()
    started.wait()
    for token in range(8):
        model.decode(cache, token)
        order.append("step")
    thread.join()
    # 8,000 tokens are 16 passes; in turn with them, 8 steps end before the prompt does.
    assert order.index("prompt") == 8


WAITING = """
import os, signal, threading, time
from test_shared_model import LONG, SHAPE
from qwen_rs import Model
model = Model.random(SHAPE)
other = threading.Thread(target=lambda: model.prefill(model.new_cache(), LONG[:{rows}], all_logits=True))
signal.signal(signal.SIGINT, signal.default_int_handler)
cache = model.new_cache()
other.start()
time.sleep(0.05)
threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    while other.is_alive():
        model.prefill(cache, LONG)
except KeyboardInterrupt:
    print("interrupted", cache.seq_len, other.is_alive())
other.join()
"""


def test_15_control_c_reaches_a_thread_that_waits_for_its_turn() -> None:
    assert run(WAITING.format(rows=8000)) == "interrupted 0 True\n"


HANDLER = """
import os, signal, threading
from test_shared_model import LONG, SHAPE
import numpy as np
from qwen_rs import CacheError, Model
model = Model.random(SHAPE)
expected = model.prefill(model.new_cache(), [1, 2, 3])
long = model.prefill(model.new_cache(), LONG[:1500])
cache, seen = model.new_cache(), []

def handler(number, frame):
    seen.append(np.array_equal(model.prefill(model.new_cache(), [1, 2, 3]), expected))
    try:
        model.decode(cache, 1)
    except CacheError:
        seen.append(True)

signal.signal(signal.SIGUSR1, handler)
threading.Timer(0.08, os.kill, (os.getpid(), signal.SIGUSR1)).start()
logits = model.prefill(cache, LONG[:1500])
while not seen:
    logits = model.prefill(cache := model.new_cache(), LONG[:1500])
print(seen[0], np.array_equal(logits, long))
"""


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="no such signal here")
def test_15_a_signal_handler_may_generate_on_the_model_that_it_interrupts() -> None:
    assert run(HANDLER) == "True True\n"


def test_16_a_batch_that_fails_leaves_every_cache_and_block_as_it_was(demo: LLM) -> None:
    model = demo.model
    pool = model.new_pool(5, block_rows=8)
    first, second, shared = pool.new_cache(), pool.new_cache(), pool.new_cache()
    model.prefill(first, list(range(8)))  # full: the next row takes a block
    model.prefill(second, list(range(8)))
    model.prefill(shared, list(range(4)))
    fork = shared.fork()  # the next row copies the block that both hold
    for batch in ([first, fork, second], [fork, first, second], [first, second, fork]):
        assert pool.free_blocks == 2
        with pytest.raises(CacheError, match="exhausted"):
            model.decode_batch(batch, [1, 2, 3])
        assert pool.free_blocks == 2
        assert [c.seq_len for c in (first, second, shared, fork)] == [8, 8, 4, 4]
    alone = model.new_cache()
    model.prefill(alone, list(range(4)))
    expected = model.decode(alone, 9)
    for cache in (fork, shared):  # the first copies, the second then has the block for itself
        assert np.array_equal(model.decode(cache, 9), expected)
        assert pool.free_blocks == 1


def test_16_an_interrupted_prompt_gives_back_the_blocks_that_it_took(model: Model) -> None:
    pool = model.new_pool(200, block_rows=64)
    cache = pool.new_cache()
    model.prefill(cache, LONG[:100])
    fork = cache.fork()
    free = pool.free_blocks
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        model.prefill(fork, LONG)
    timer.join()
    assert (pool.free_blocks, fork.seq_len, cache.seq_len) == (free, 100, 100)
    assert np.array_equal(model.decode(fork, 1), model.decode(cache, 1))


MEMORY = """
import resource, sys
from checkpoints import config
import json, numpy as np
from qwen_rs import CacheError, Model
model = Model.random(json.dumps(config(vocab_size=5000, head_dim=64)), threads=2)
expected = model.prefill(model.new_cache(), [1, 2, 3])

def limited(work, room):
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + room, resource.RLIM_INFINITY))
    try:
        work()
        return "done"
    except (MemoryError, CacheError):
        return "refused"
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

prompt = [1 + i % 300 for i in range(6000)]
held = {kind: model.new_cache(kind) for kind in ("basic", "concat")}
held["paged"] = model.new_pool(200).new_cache()
for cache in held.values():
    model.prefill(cache, prompt)
snapshot = model.snapshot(held["basic"])
works = {
    "prefill": lambda: model.prefill(model.new_cache(), prompt),
    "prefill all": lambda: model.prefill(model.new_cache(), prompt, all_logits=True),
    "prefill concat": lambda: model.prefill(model.new_cache("concat"), prompt),
    "prefill f16": lambda: model.prefill(model.new_cache(kv_dtype="f16"), prompt),
    "decode concat": lambda: model.decode(held["concat"], 1),
    "chunk concat": lambda: model.prefill(held["concat"], prompt[:600]),
    "chunk basic": lambda: model.prefill(held["basic"], prompt[:600]),
    "chunk paged": lambda: model.prefill(held["paged"], prompt[:600]),
    "snapshot": lambda: [model.snapshot(c) for c in held.values()],
    "restore": lambda: model.restore(model.new_cache(), snapshot),
    "restore concat": lambda: model.restore(model.new_cache("concat"), snapshot),
    "batch": lambda: model.decode_batch(list(held.values()), [1, 2, 3]),
}
name = sys.argv[1]
rows = {kind: cache.seq_len for kind, cache in held.items()}
results = []
for room in (0, 1 << 16, 1 << 18, 1 << 20, 3 << 20, 6 << 20, 12 << 20, 24 << 20):
    before = {kind: cache.seq_len for kind, cache in held.items()}
    result = limited(works[name], room)
    after = {kind: cache.seq_len for kind, cache in held.items()}
    assert result == "done" or before == after, (name, room, before, after)
    results.append(result)
for kind, cache in held.items():
    cache.truncate(rows[kind])
assert np.array_equal(model.prefill(model.new_cache(), [1, 2, 3]), expected)
print(" ".join(sorted(set(results))))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits of address space are Linux's")
@pytest.mark.parametrize(
    "work",
    [
        "prefill",
        "prefill all",
        "prefill concat",
        "prefill f16",
        "decode concat",
        "chunk concat",
        "chunk basic",
        "chunk paged",
        "snapshot",
        "restore",
        "restore concat",
        "batch",
    ],
)
def test_17_no_memory_is_an_error_and_the_model_goes_on(work: str) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path])}
    result = subprocess.run(
        [sys.executable, "-c", MEMORY, work], capture_output=True, text=True, timeout=120, env=environment
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert "refused" in result.stdout


def test_17_each_pass_is_booked_as_what_it_is(model: Model) -> None:
    """Prefill and decode on two threads at once: a single row is never booked as a prompt's."""
    steps, done = 0, threading.Event()
    caches = [model.new_cache() for _ in range(2)]
    model.prefill(caches[0], [1, 2, 3])
    model.trace_ops(True)

    def prompts() -> None:
        for _ in range(4):
            model.prefill(model.new_cache(), LONG[:600])
        done.set()

    thread = threading.Thread(target=prompts)
    thread.start()
    while not done.is_set():
        model.decode(caches[0], 1)
        steps += 1
    thread.join()
    calls = {(phase, op): calls for phase, op, calls, _ in model.op_stats()}
    model.trace_ops(False)
    assert calls["prefill", "embed"] == 4 * 2  # 600 rows are two passes
    assert calls["decode", "embed"] == steps == calls["decode", "lm_head"]


@pytest.mark.parametrize("block_rows", [2**61, 2**62, 2**63, 2**50])
def test_19_sizes_that_wrap_are_refused(demo: LLM, block_rows: int) -> None:
    with pytest.raises((ValueError, CacheError), match="memory"):
        pool = demo.model.new_pool(1, block_rows=block_rows)
        demo.model.prefill(pool.new_cache(), [1])


THREADS = """
import resource
from qwen_rs import Model
from conftest import DEMO
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, resource.RLIM_INFINITY))
try:
    Model.load(DEMO, threads=1000)
except OSError as error:
    print("OSError", str(error).splitlines()[0])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits of address space are Linux's")
def test_10_threads_that_cannot_be_had_are_an_os_error() -> None:
    assert run(THREADS).startswith("OSError 1000 worker threads")


def scaled(directory: Path, name: str, factor: float, **fields: object) -> Path:
    from safetensors.numpy import load_file, save_file

    write(directory, config(**fields))
    tensors = load_file(directory / "model.safetensors")
    for key in tensors:
        if key.removesuffix(".weight").endswith(name):
            tensors[key] = (tensors[key] * np.float32(factor)).astype(np.float32)
    save_file(tensors, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize("dtype", ["f32", "bf16", "q8_0"])
@pytest.mark.parametrize(
    ("name", "factor", "where"),
    [
        ("v_proj", 1e36, "(o_proj|attention|down_proj|qkv_proj) of layer"),
        ("up_proj", 1e37, "(down_proj|qkv_proj) of layer|lm_head"),
        ("embed_tokens", 1e30, "qkv_proj of layer 0|lm_head"),
    ],
)
def test_02_logits_that_are_not_finite_are_an_error_that_names_the_operation(
    tmp_path: Path, name: str, factor: float, where: str, dtype: str
) -> None:
    directory = scaled(tmp_path, name, factor)
    try:
        model = Model.load(directory, dtype=dtype)
    except ModelError:
        return  # does not fit in the dtype: said when it is packed
    cache = model.new_cache()
    for call in (
        lambda: model.prefill(cache, LONG[:20]),
        lambda: model.prefill(cache, LONG[:600]),
        lambda: model.prefill(cache, LONG[:20], all_logits=True),
        lambda: model.decode(cache, 1),
        lambda: model.decode_batch([cache, model.new_cache()], [1, 2]),
    ):
        with pytest.raises(ModelError, match=f"({where}).* gives NaN or infinity"):
            call()
        assert cache.seq_len == 0


def test_02_an_f16_cache_that_overflows_is_an_error_that_names_it(tmp_path: Path) -> None:
    directory = scaled(tmp_path, "v_proj", 1e6)
    model = Model.load(directory, dtype="f32")
    for cache in (
        model.new_cache(kv_dtype="f16"),
        model.new_cache("concat", kv_dtype="f16"),
        model.new_pool(40, kv_dtype="f16").new_cache(),
    ):
        with pytest.raises(CacheError, match=r"layer \d: .*65504.*f16 cache.*f32"):
            model.prefill(cache, LONG[:700])
        with pytest.raises(CacheError, match="f16 cache"):
            model.decode(cache, 1)
        assert cache.seq_len == 0
    assert np.isfinite(model.prefill(model.new_cache(), LONG[:700])).all()


def test_03_restore_refuses_what_does_not_fit(demo: LLM, tmp_path: Path) -> None:
    model = demo.model
    cache = model.new_cache()
    model.prefill(cache, list(range(40)))
    snapshot = model.snapshot(cache)
    other = Model.load(write(tmp_path / "other", config()))
    for target in (other.new_cache(), other.new_cache("concat"), other.new_pool(9).new_cache()):
        with pytest.raises(ValueError, match="another shape"):
            model.restore(target, snapshot)
        assert target.seq_len == 0
    half = model.new_cache(kv_dtype="f16")
    with pytest.raises(ValueError, match="f32 cache"):
        model.restore(half, snapshot)
    assert half.seq_len == 0
    from_half = model.new_cache(kv_dtype="f16")
    model.prefill(from_half, list(range(40)))
    model.restore(half, model.snapshot(from_half))
    assert np.array_equal(model.decode(half, 7), model.decode(from_half, 7))


@pytest.mark.parametrize("dtypes", [("f32", "f16"), ("f16", "f32")])
def test_03_a_snapshot_goes_into_a_cache_of_its_own_dtype(
    demo: LLM, tmp_path: Path, dtypes: tuple[str, str]
) -> None:
    cache, other = (demo.model.new_cache(kv_dtype=dtype) for dtype in dtypes)
    demo.model.prefill(cache, list(range(40)))
    save_snapshot(tmp_path / "s", demo.model, cache)
    with pytest.raises(ModelError, match=f"of a cache of {dtypes[0]}, this one is {dtypes[1]}"):
        load_snapshot(tmp_path / "s", demo.model, other)
    assert other.seq_len == 0


@pytest.mark.parametrize("name", ["layernorm", "q_norm", "model.norm", "up_proj", "embed_tokens", "o_proj"])
def test_03_the_fingerprint_tells_models_apart_by_any_weight(tmp_path: Path, name: str) -> None:
    one = Model.load(write(tmp_path / "one", config()))
    changed = write(tmp_path / "other", config())
    from safetensors.numpy import load_file, save_file

    tensors = load_file(changed / "model.safetensors")
    key = next(key for key in sorted(tensors) if name in key)
    tensors[key].flat[-1] += 0.5  # one value
    save_file(tensors, changed / "model.safetensors")
    assert Model.load(changed).fingerprint != one.fingerprint
    assert Model.load(tmp_path / "one").fingerprint == one.fingerprint
    assert Model.load(tmp_path / "one", dtype="f32").fingerprint != one.fingerprint
    assert Model.load(DEMO).fingerprint != one.fingerprint
