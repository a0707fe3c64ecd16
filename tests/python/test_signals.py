"""Ctrl-C during load, prefill and decode: it stops soon, and the model goes on working.

The signal is sent by a thread of the same process; the work it interrupts takes seconds.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from conftest import report

from qwen_rs import Cache, Model

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 4000,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 16384,
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    yield Model.random(json.dumps(CONFIG))


def interrupted_after(seconds: float, work: Callable[[], object]) -> float:
    """Milliseconds from the signal to the KeyboardInterrupt."""
    sent = []

    def send() -> None:
        time.sleep(seconds)
        sent.append(time.perf_counter())
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=send)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        work()
    ended = time.perf_counter()
    thread.join()
    return 1000 * (ended - sent[0])


def test_prefill_stops_and_the_cache_is_as_before(model: Model) -> None:
    cache = model.new_cache()
    model.prefill(cache, list(range(50)))
    prompt = [i % 4000 for i in range(12_000)]
    took = interrupted_after(0.3, lambda: model.prefill(cache, prompt))
    report(f"prefill stopped {took:.0f} ms after the signal")
    assert cache.seq_len == 50
    fresh = model.new_cache()
    model.prefill(fresh, list(range(50)))
    assert np.array_equal(model.decode(cache, 7), model.decode(fresh, 7))


def test_decode_stops_and_the_cache_holds_whole_rows(model: Model) -> None:
    cache = model.new_cache()
    model.prefill(cache, [1, 2, 3])

    def loop() -> None:
        end = time.perf_counter() + 30
        while time.perf_counter() < end:
            model.decode(cache, 5)
            cache.truncate(3 + cache.seq_len % 100)

    took = interrupted_after(0.3, loop)
    report(f"decode stopped {took:.0f} ms after the signal")
    cache.truncate(3)
    fresh = model.new_cache()
    model.prefill(fresh, [1, 2, 3])
    assert np.array_equal(model.decode(cache, 7), model.decode(fresh, 7))


def test_load_stops() -> None:
    config = json.dumps(CONFIG | {"num_hidden_layers": 400})  # some ten seconds
    took = interrupted_after(1.0, lambda: Model.random(config))
    report(f"load stopped {took:.0f} ms after the signal")


def test_fifty_random_moments_leave_a_usable_model(model: Model) -> None:
    """Ctrl-C at any moment: before, in and after load, prefill and decode."""
    rng = random.Random(20)
    prompt = [i % 4000 for i in range(1500)]
    start = list(range(40))
    untouched = model.new_cache()
    model.prefill(untouched, start)
    expected = model.decode(untouched, 7)
    small = json.dumps(CONFIG | {"num_hidden_layers": 12})
    taken = {"load": 0, "prefill": 0, "decode": 0}

    def decode(cache: Cache) -> None:
        for token in range(40):
            model.decode_batch([cache], [token])

    for moment in range(50):
        kind = ("load", "prefill", "decode")[moment % 3]
        cache = model.new_cache()
        model.prefill(cache, start)
        timer = threading.Timer(rng.uniform(0, 0.6), os.kill, (os.getpid(), signal.SIGINT))
        try:
            timer.start()
            if kind == "load":
                Model.random(small)
            elif kind == "prefill":
                model.prefill(cache, prompt)
            else:
                decode(cache)
            timer.join()
            time.sleep(0.001)  # the signal is handled here if the work was done before it
        except KeyboardInterrupt:
            taken[kind] += 1
        timer.join()
        cache.truncate(len(start))
        assert cache.seq_len == len(start)
        assert np.array_equal(model.decode(cache, 7), expected), (moment, kind)
    report(f"interrupted at {sum(taken.values())} of 50 random moments: {taken}")
    assert sum(taken.values()) == 50
