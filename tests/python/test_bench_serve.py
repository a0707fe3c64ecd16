"""``qwen-rs bench --serve``: every answer is counted as what it was, and the figures are exact.

The server is a small one of known answers; nothing here asserts how long anything takes.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from test_cli import one_line, run

from qwen_rs.bench_serve import Answer, Load, figures, percentile


def load(**changed: Any) -> Load:
    settings: dict[str, Any] = {
        "clients": 2,
        "rate": None,
        "requests": 4,
        "seconds": None,
        "prompt_tokens": (8, 8),
        "answer_tokens": (4, 4),
        "shared_prefix": 0.0,
        "cancel": 0.0,
        "seed": 0,
        "vocab": 100,
        "stop_at_eos": False,
        "timeout": 60.0,
        "ttft_goal": None,
        "gap_goal": None,
    }
    return Load(**(settings | changed))


def test_a_percentile_is_the_nearest_rank() -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert [percentile(values, share) for share in (0.0, 0.01, 0.5, 0.99, 1.0)] == [1, 1, 50, 99, 100]
    assert percentile(values[:1], 0.5) == percentile(values[:1], 0.99) == 100
    assert [percentile([1.0, 2.0, 3.0], share) for share in (0.33, 0.34, 0.5, 0.67)] == [1, 2, 2, 3]
    assert percentile([], 0.5) is None


def test_the_figures_of_known_answers_are_exact() -> None:
    def answer(index: int, outcome: str, started: float, ended: float, *frames: float) -> Answer:
        return Answer(index, started, outcome, ended, list(frames))

    first = answer(0, "complete", 0.0, 2.0, 0.5, 0.75, 1.75)
    first.prompt_tokens, first.completion_tokens, first.cached_tokens = 100, 11, 64
    second = answer(1, "complete", 1.0, 4.0, 1.25, 1.5)
    second.prompt_tokens, second.completion_tokens = 60, 3
    answers = [
        first,
        second,
        answer(2, "cancelled", 0.0, 0.5, 0.25),
        answer(3, "HTTP 429", 2.0, 2.125),
        answer(4, "HTTP 429", 2.0, 2.25),
        answer(5, "broken stream", 2.0, 3.0, 2.5),
    ]
    told = figures(load(ttft_goal=300.0), answers, 0.5)
    assert told == {
        "seconds": 4.0,
        "requests": 6,
        "complete": 2,
        "cancelled": 1,
        "errors": {"HTTP 429": 2, "broken stream": 1},
        "ttft_ms": {"p50": 250.0, "p99": 500.0},
        "gap_ms": {"p50": 250.0, "p99": 1000.0},
        "per_token_ms": {"p50": 125.0, "p99": 125.0},
        "answer_ms": {"p50": 2000.0, "p99": 3000.0},
        "refusal_ms": {"p50": 125.0, "p99": 250.0},
        "prompt_tokens": 160,
        "cached_tokens": 64,
        "completion_tokens": 14,
        "tokens_per_second": 3.5,
        "prompt_tokens_per_second": 40.0,
        "requests_per_second": 0.5,
        "good": 1,
        "good_requests_per_second": 0.25,
        "good_tokens_per_second": 0.75,
        "client_cpu_seconds": 0.5,
        "client_cpu_share": 0.125,
    }
    assert figures(load(), answers, 0.5)["good"] == 2
    assert figures(load(gap_goal=124.0), answers, 0.5)["good"] == 0
    assert figures(load(), [], 0.0)["tokens_per_second"] == 0


def test_a_request_is_a_function_of_the_seed_and_its_number() -> None:
    plan = load(prompt_tokens=(10, 40), answer_tokens=(1, 9), shared_prefix=0.5, cancel=0.25, rate=20.0)
    requests = [plan.request(index) for index in range(400)]
    assert requests == [plan.request(index) for index in range(400)]
    assert requests != [load(**(vars(plan) | {"seed": 1})).request(index) for index in range(400)]
    longest = max(requests, key=lambda r: len(r.prompt)).prompt
    for r in requests:
        common = round(len(r.prompt) / 2)
        assert r.prompt[:common] == longest[:common]
        assert all(0 <= token < 100 for token in r.prompt)
        assert r.leaves_after is None or r.leaves_after < r.answer_tokens
        assert r.pause > 0
    assert {len(r.prompt) for r in requests} == set(range(10, 41))
    assert {r.answer_tokens for r in requests} == set(range(1, 10))
    assert 60 < sum(r.leaves_after is not None for r in requests) < 140
    assert 0.03 < sum(r.pause for r in requests) / 400 < 0.07
    assert load().request(0).prompt != load().request(1).prompt


class Fake:
    """A server of known answers; ``kinds`` decides what becomes of the request of a number."""

    def __init__(self, kind: Callable[[int], str] = lambda number: "whole") -> None:
        self.kind = kind
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.open = self.most_open = 0
        self.left = 0
        self.url = ""

    async def models(self, request: Request) -> Response:
        if self.kind(-1) == "locked" and request.headers.get("authorization") != "Bearer secret":
            return JSONResponse({"error": {"message": "no key"}}, 401)
        return JSONResponse({"object": "list", "data": [{"id": "fake"}]})

    async def completions(self, request: Request) -> Response:
        body = await request.json()
        kind = self.kind(len(self.bodies))
        self.bodies.append(body)
        self.keys.append(request.headers.get("authorization"))
        if kind.startswith("HTTP "):
            headers = {"retry-after": "0.01"} if kind == "HTTP 429" else {}
            return JSONResponse({"error": {"message": "as asked"}}, int(kind[5:]), headers)
        return StreamingResponse(self.frames(kind, body), media_type="text/event-stream")

    async def frames(self, kind: str, body: dict[str, Any]) -> AsyncIterator[str]:
        def frame(value: dict[str, Any]) -> str:
            return f"data: {json.dumps(value)}\n\n"

        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            if kind == "hangs":
                await asyncio.sleep(3600)
            tokens = body["max_tokens"]
            # Two tokens a frame, and one of no text: frames are not tokens.
            yield ": a comment\n\n" + frame({"choices": [{"index": 0, "text": "", "finish_reason": None}]})
            for _ in range((tokens + 1) // 2):
                await asyncio.sleep(0)
                yield frame({"choices": [{"index": 0, "text": "ab", "finish_reason": None}], "usage": None})
                if kind == "breaks":
                    return
                if kind == "error":
                    yield frame({"error": {"message": "no more blocks"}})
                    return
                if kind == "nonsense":
                    yield "data: {]\n\n"
                    return
                if kind == "stops":
                    await asyncio.sleep(3600)
            usage = {
                "prompt_tokens": len(body["prompt"]),
                "completion_tokens": tokens,
                "prompt_tokens_details": {"cached_tokens": 3},
            }
            if kind != "tells no usage":
                yield frame({"choices": [], "usage": usage})
            yield "data: [DONE]\n\n"
        except asyncio.CancelledError:
            self.left += 1
            raise
        finally:
            self.open -= 1


@contextmanager
def serving(fake: Fake) -> Iterator[Fake]:
    routes = [
        Route("/v1/models", fake.models),
        Route("/v1/completions", fake.completions, methods=["POST"]),
    ]
    with socket.create_server(("127.0.0.1", 0)) as listening:
        config = uvicorn.Config(Starlette(routes=routes), log_level="error", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        fake.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        try:
            yield fake
        finally:
            server.should_exit = True
            thread.join()


def measure(fake: Fake, path: Path, *args: str) -> tuple[dict[str, Any], str]:
    result = run("bench", "--serve", fake.url, "--json", str(path / "told.json"), *args)
    assert result.returncode == 0, result.stderr
    told: dict[str, Any] = json.loads((path / "told.json").read_text())
    return told, result.stdout


def test_tokens_are_counted_by_usage_and_every_request_is_sent_as_planned(tmp_path: Path) -> None:
    sizes = ["--clients", "3", "--requests", "20", "--prompt-tokens", "5-9", "--answer-tokens", "7"]
    with serving(Fake()) as fake:
        told, table = measure(
            fake, tmp_path, *sizes, "--seed", "5", "--vocab", "50", "--shared-prefix", "0.5"
        )
    assert (told["requests"], told["complete"], told["cancelled"], told["errors"]) == (20, 20, 0, {})
    assert told["model"] == "fake" and told["url"] == fake.url
    assert told["completion_tokens"] == 20 * 7
    assert told["prompt_tokens"] == sum(len(body["prompt"]) for body in fake.bodies)
    assert told["cached_tokens"] == 20 * 3
    assert [len(a["frames"]) for a in told["answers"]] == [4] * 20  # of 7 tokens
    assert told["tokens_per_second"] == 140 / told["seconds"]
    assert told["client_cpu_seconds"] > 0
    plan = Load(**{k: tuple(v) if isinstance(v, list) else v for k, v in told["load"].items()})
    planned = sorted(plan.request(index).prompt for index in range(20))
    assert sorted(body["prompt"] for body in fake.bodies) == planned
    for body in fake.bodies:
        assert body["stream"] is True and body["stream_options"] == {"include_usage": True}
        assert (body["model"], body["max_tokens"], body["ignore_eos"]) == ("fake", 7, True)
    assert fake.most_open <= 3
    assert "20 complete, 0 cancelled, 0 errors" in table
    assert "(by usage)" in table and "gap between frames" in table


def test_each_kind_of_error_is_counted_as_what_it_is(tmp_path: Path) -> None:
    kinds = {
        "whole": "complete",
        "HTTP 429": "HTTP 429",
        "HTTP 500": "HTTP 500",
        "breaks": "broken stream",
        "nonsense": "broken stream",
        "error": "error in the stream",
        "tells no usage": "no usage",
        "hangs": "timeout",
        "stops": "timeout",
    }
    names = list(kinds)
    with serving(Fake(lambda number: names[number % len(names)])) as fake:
        told, table = measure(fake, tmp_path, "--requests", "18", "--clients", "9", "--timeout", "3")
    outcomes = Counter(kinds.values())
    assert told["complete"] == 2
    expected = {kind: 2 * count for kind, count in outcomes.items() if kind != "complete"}
    assert told["errors"] == dict(sorted(expected.items()))
    assert told["completion_tokens"] == 2 * 32
    assert told["refusal_ms"]["p50"] is not None
    for kind, count in expected.items():
        assert f"  {kind}: {count}\n" in table


def test_clients_that_go_are_no_errors_and_the_server_sees_them_go(tmp_path: Path) -> None:
    with serving(Fake(lambda number: "stops")) as fake:
        told, _ = measure(fake, tmp_path, "--requests", "12", "--cancel", "1", "--answer-tokens", "2")
    # Of two tokens, one frame: each goes at once or after it.
    assert (told["cancelled"], told["complete"], told["errors"]) == (12, 0, {})
    assert {len(a["frames"]) for a in told["answers"]} <= {0, 1}
    assert fake.open == 0 and 0 < fake.left <= 12  # one may go before the server has read its request
    assert told["ttft_ms"] == {"p50": None, "p99": None}


def test_an_open_loop_waits_for_nobody(tmp_path: Path) -> None:
    with serving(Fake(lambda number: "hangs")) as fake:
        told, table = measure(fake, tmp_path, "--rate", "200", "--requests", "40", "--timeout", "2")
    assert told["errors"] == {"timeout": 40}
    assert fake.most_open == 40
    assert "200 arrivals/s" in table


def test_a_run_of_seconds_ends_and_waits_for_the_open_ones(tmp_path: Path) -> None:
    with serving(Fake()) as fake:
        told, _ = measure(fake, tmp_path, "--seconds", "0.5", "--clients", "2", "--stop-at-eos")
    assert told["complete"] == told["requests"] == len(fake.bodies) > 0
    assert all(a["started"] < 0.5 for a in told["answers"])
    assert not any("ignore_eos" in body for body in fake.bodies)


def test_the_key_is_sent_and_told_to_nobody(tmp_path: Path) -> None:
    with serving(Fake(lambda number: "locked" if number < 0 else "whole")) as fake:
        without = run("bench", "--serve", fake.url, "--requests", "1")
        one_line(without, 2, "/v1/models", "401", "--api-key")
        told, table = measure(fake, tmp_path, "--requests", "2", "--api-key", "secret")
    assert fake.keys == ["Bearer secret"] * 2
    assert "secret" not in json.dumps(told) + table


def test_the_plot_is_a_png_also_of_no_answers(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plot"
    for kind in ("whole", "HTTP 500"):
        with serving(Fake(lambda number, kind=kind: kind)) as fake:
            measure(fake, tmp_path, "--requests", "3", "--plot", str(path))
        assert path.read_bytes().startswith(b"\x89PNG")


def test_no_server_gets_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    one_line(run("bench", "--serve", f"http://127.0.0.1:{port}"), 1, f"127.0.0.1:{port}/v1/models")


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["--clients", "3"], ["--clients", "--serve"]),
        (["--api-key", "x"], ["--api-key", "--serve"]),
        (["--stop-at-eos"], ["--stop-at-eos", "--serve"]),
        (["--serve", "http://h", "--threads", "2"], ["--threads", "does not go with --serve"]),
        (["--serve", "http://h", "-p", "5"], ["--prefill", "does not go with --serve"]),
        (["--serve", "h:1"], ["--serve h:1", "http://"]),
        (["--serve", "http://h", "--clients", "0"], ["--clients", "1 to 10000", "0"]),
        (["--serve", "http://h", "--clients", "1", "--rate", "2"], ["--rate", "--clients"]),
        (["--serve", "http://h", "--requests", "1", "--seconds", "2"], ["--seconds", "--requests"]),
        (["--serve", "http://h", "--rate", "nan"], ["--rate", "nan"]),
        (["--serve", "http://h", "--cancel", "2"], ["--cancel", "0 to 1"]),
        (["--serve", "http://h", "--prompt-tokens", "9-5"], ["--prompt-tokens", "9-5"]),
        (["--serve", "http://h", "--prompt-tokens", "x"], ["--prompt-tokens", "number or range"]),
        (["--serve", "http://h", "--api-key", "a\nb"], ["--api-key", "printable"]),
        (["--serve", "http://h", "--seed", "9" * 30], ["--seed", "out of range"]),
    ],
)
def test_wrong_usage_gets_one_line(args: list[str], parts: list[str]) -> None:
    one_line(run("bench", *args), 2, *parts)
