"""Clients that go away, read slowly, or come when the server is about to end."""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from served import GUARD, Served, chatting, serving

from qwen_rs import LLM, SamplingParams

LONG: dict[str, Any] = {"prompt": "Emma", "max_tokens": 1900, "ignore_eos": True, "temperature": 0}
PROMPT = [5 + i % 500 for i in range(1900)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chatting(tmp_path_factory.mktemp("served") / "chatty")


@pytest.fixture(scope="module")
def served(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(folder, tmp_path_factory.mktemp("log") / "log", "--max-num-seqs", "2") as server:
        yield server


def connect(served: Served, body: dict[str, Any]) -> socket.socket:
    """A request that is sent, and whose answer nobody has read."""
    url = urlsplit(served.url)
    assert url.hostname is not None and url.port is not None
    own = socket.create_connection((url.hostname, url.port), timeout=GUARD)
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
    own.sendall(head.encode() + content)
    return own


def live(served: Served) -> float:
    return served.metric("num_requests_running") + served.metric("num_requests_waiting")


def until(condition: Any) -> None:
    deadline = time.monotonic() + GUARD
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("where", ["queued", "prefill", "decode"])
def test_4_who_goes_away_leaves_nothing_running(served: Served, where: str, stream: bool) -> None:
    until(lambda: live(served) == 0)
    cancelled = served.metric("requests_cancelled_total")
    others = [connect(served, LONG) for _ in range(2 if where == "queued" else 0)]
    prompt = PROMPT if where == "prefill" else "Emma"
    until(lambda: live(served) >= len(others))
    own = connect(served, {**LONG, "prompt": prompt, "stream": stream})
    if where == "decode" and stream:
        assert own.recv(16)
    until(lambda: live(served) == len(others) + 1 or served.metric("requests_cancelled_total") > cancelled)
    for one in [own, *others]:
        one.close()
    until(lambda: live(served) == 0)
    assert served.metric("requests_cancelled_total") == cancelled + 1 + len(others)
    free = served.metric("kv_cache_free_blocks") + served.metric("kv_cache_cached_blocks")
    assert free == served.metric("kv_cache_blocks")


def test_5_a_cancelled_neighbour_changes_nobody_s_bits(served: Served, folder: Path) -> None:
    alone = LLM(folder, threads=1).generate("Emma", SamplingParams(max_tokens=200, seed=3, logprobs=0))
    body = {"prompt": "Emma", "max_tokens": 200, "seed": 3, "logprobs": 0}
    cancelled = served.metric("requests_cancelled_total")
    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(served.post, "/v1/completions", body) for _ in range(4)]
        while not all(answer.done() for answer in answers):
            connect(served, LONG).close()
            time.sleep(0.02)
    until(lambda: live(served) == 0)
    assert served.metric("requests_cancelled_total") > cancelled
    for answer in answers:
        (choice,) = answer.result().json()["choices"]
        assert choice["text"] == alone.text
        expected = [row[t] for t, row in zip(alone.token_ids, alone.logprobs or [], strict=True)]
        assert choice["logprobs"]["token_logprobs"] == expected


def test_sigterm_lets_what_runs_end_and_takes_no_more(folder: Path, tmp_path: Path) -> None:
    with serving(folder, tmp_path / "log") as own, ThreadPoolExecutor(1) as pool:
        running = pool.submit(own.post, "/v1/completions", LONG)
        until(lambda: live(own) == 1)
        own.process.send_signal(signal.SIGTERM)
        assert running.result().json()["usage"]["completion_tokens"] == LONG["max_tokens"]
        assert own.process.wait(GUARD) == 0
        assert "Traceback" not in own.log.read_text()
