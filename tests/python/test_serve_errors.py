"""What is wrong with a request is told in OpenAI's shape, and the next request is served."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from served import GUARD, Served, chatting, events, serving

from qwen_rs.cli import main

COMPLETION: dict[str, Any] = {"prompt": "Emma", "max_tokens": 2, "temperature": 0}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Why?"}], "max_tokens": 2}
KEY = "a key"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = chatting(tmp_path_factory.mktemp("served") / "chatty")
    with serving(folder, tmp_path_factory.mktemp("log") / "log") as server:
        yield server


def refused(served: Served, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    response = served.post(path, body)
    assert response.status_code == status, response.text
    assert response.headers["x-request-id"]
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["code"] == status
    assert "Traceback" not in error["message"] and "\n" not in error["message"]
    return dict(error)


def is_served(served: Served) -> bool:
    return served.post("/v1/completions", COMPLETION).status_code == 200


BAD: list[tuple[str, Any]] = [
    ("temperature", -1),
    ("temperature", "hot"),
    ("temperature", True),
    ("top_p", 0),
    ("top_p", 1.5),
    ("min_p", 2),
    ("top_k", -2),
    ("presence_penalty", 3),
    ("frequency_penalty", -3),
    ("repetition_penalty", 0),
    ("n", 0),
    ("n", 129),
    ("n", 1 << 70),
    ("seed", -1),
    ("seed", 1 << 65),
    ("seed", 1.5),
    ("max_tokens", -1),
    ("max_tokens", 1 << 63),
    ("stop", [""]),
    ("stop", {"a": 1}),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [10**9]),
    ("logit_bias", {"a": 1}),
    ("logit_bias", {"5": 101}),
    ("logit_bias", {"999999999": 1}),
    ("logit_bias", [1]),
    ("stream", "yes"),
    ("stream_options", {"include_usage": True}),
    ("stream_options", {"other": True}),
    ("priority", 1 << 31),
    ("cache_salt", 5),
    ("temprature", 1),
    ("best_of", 2),
    ("suffix", "x"),
    ("model", 5),
]


@pytest.mark.parametrize(("field", "value"), BAD)
def test_10_a_bad_value_is_a_400_that_names_it_and_the_next_request_is_served(
    served: Served, field: str, value: Any
) -> None:
    for path, body in (("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)):
        error = refused(served, path, {**body, field: value})
        assert error["type"] == "invalid_request_error"
        assert field in error["message"] or field in (error["param"] or "")
    assert is_served(served)


@pytest.mark.parametrize(
    "prompt", [[], "", [""], [[]], [1, "a"], [-1], [10**9], [[1], [10**9]], 5, None, {"a": 1}, "Emma " * 5000]
)
def test_10_a_bad_prompt_is_a_400(served: Served, prompt: Any) -> None:
    error = refused(served, "/v1/completions", {**COMPLETION, "prompt": prompt})
    assert "prompt" in error["message"] or error["param"] == "prompt" or "token" in error["message"]
    assert is_served(served)


@pytest.mark.parametrize(
    "messages",
    [[], "hi", [{}], [{"role": "user"}], [{"role": 1, "content": "x"}], [{"role": "poet", "content": "x"}],
     [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], [5], None],
)  # fmt: skip
def test_10_bad_messages_are_a_400(served: Served, messages: Any) -> None:
    refused(served, "/v1/chat/completions", {**CHAT, "messages": messages})
    assert is_served(served)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'"x"', b"\xff", b"[" * 100_000, b"5"])
def test_10_a_bad_body_is_a_400(served: Served, body: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        refused(served, path, body)
    assert is_served(served)


def test_17_half_a_surrogate_pair_is_a_400(served: Served) -> None:
    for text in (rb"\ud83d", rb"\udc00 x", rb"a\ud83db"):
        refused(served, "/v1/completions", b'{"prompt": "' + text + b'"}')
        refused(served, "/v1/completions", b'{"prompt": "a", "stop": "' + text + b'"}')
        refused(served, "/v1/completions", b'{"prompt": "a", "cache_salt": "' + text + b'"}')
        refused(
            served, "/v1/chat/completions", b'{"messages": [{"role": "user", "content": "' + text + b'"}]}'
        )
    whole = b'{"prompt": "\\ud83d\\ude00", "max_tokens": 1}'
    assert served.post("/v1/completions", whole).status_code == 200


def test_another_model_is_a_404_and_so_is_another_route(served: Served) -> None:
    assert (
        "'chatty' is" in refused(served, "/v1/completions", {**COMPLETION, "model": "gpt-5"}, 404)["message"]
    )
    refused(served, "/v1/nothing", {}, 404)
    assert served.http.get("/v1/models/gpt-5").status_code == 404
    assert served.http.get("/v1/completions").status_code == 405


def test_a_body_that_is_too_large_is_a_413(served: Served) -> None:
    error = refused(served, "/v1/completions", b'{"prompt": "' + b"a" * (64 << 20) + b'"}', 413)
    assert str(64 << 20) in error["message"]
    assert is_served(served)


def test_7_a_request_larger_than_the_pool_is_a_400_with_both_numbers(tmp_path: Path) -> None:
    with serving(chatting(tmp_path / "chatty"), tmp_path / "log", "--kv-memory", "4M") as small:
        most = small.http.get("/v1/models").json()["data"][0]["max_model_len"]
        assert 128 <= most < 2048
        error = refused(small, "/v1/completions", {**COMPLETION, "max_tokens": 1900})
        assert str(most - 1) in error["message"] and "1900" in error["message"]
        assert small.post("/v1/chat/completions", {**CHAT, "max_tokens": None}).status_code == 200


def test_19_the_queue_has_a_limit_and_says_when_to_come_back(tmp_path: Path) -> None:
    options = ["--max-num-seqs", "1", "--max-queued-requests", "2"]
    with serving(chatting(tmp_path / "chatty"), tmp_path / "log", *options) as small:
        long = {"prompt": "Emma", "max_tokens": 1900, "ignore_eos": True}
        assert refused(small, "/v1/completions", {**COMPLETION, "n": 4})["code"] == 400
        with ThreadPoolExecutor(8) as pool:
            holding = [pool.submit(small.post, "/v1/completions", long) for _ in range(8)]
            with pytest.raises(openai.RateLimitError):
                while not all(one.done() for one in holding):
                    small.openai().completions.create(model="chatty", **COMPLETION)
            patient = small.openai(max_retries=10)
            assert patient.completions.create(model="chatty", **COMPLETION).usage is not None
            answers = [one.result() for one in holding]
        assert {answer.status_code for answer in answers} == {200, 429}
        response = next(answer for answer in answers if answer.status_code == 429)
        assert response.headers["retry-after"] == "1"
        error = response.json()["error"]
        assert error["type"] == "rate_limit_error" and error["message"].startswith("3 requests")
        assert is_served(small)


def test_a_request_that_takes_too_long_is_a_503_or_ends_in_an_error(tmp_path: Path) -> None:
    with serving(chatting(tmp_path / "chatty"), tmp_path / "log", "--request-timeout", "0.2") as hasty:
        long = {"prompt": "Emma", "max_tokens": 1900, "ignore_eos": True}
        assert "0.2 seconds" in refused(hasty, "/v1/completions", long, 503)["message"]
        *_, last = events(hasty.post("/v1/completions", {**long, "stream": True}).text)
        assert last["error"]["code"] == 503
        with pytest.raises(openai.APIError, match=r"0\.2 seconds"):
            list(hasty.openai().completions.create(model="chatty", stream=True, **_client(long)))
        assert is_served(hasty)


def test_22_every_route_needs_the_key_but_health(tmp_path: Path) -> None:
    from qwen_rs.serve.app import ROUTES

    with serving(chatting(tmp_path / "chatty"), tmp_path / "log", "--api-key", KEY) as guarded:
        paths = [(route.path.replace("{name:path}", "chatty"), m) for route in ROUTES for m in route.methods]
        assert len(paths) > 4
        for path, method in [*paths, ("/nothing", "GET"), ("/v1", "POST"), ("//health", "GET")]:
            if path == "/health":
                assert guarded.http.request(method, path).status_code == 200
                continue
            for header in (None, "Bearer", "Bearer another", f"Basic {KEY}", KEY, f"Bearer {KEY}x"):
                headers = {} if header is None else {"authorization": header}
                response = guarded.http.request(method, path, headers=headers)
                assert response.status_code == 401, path
        client = guarded.openai(api_key=KEY)
        assert client.completions.create(model="chatty", **COMPLETION).usage is not None
        with pytest.raises(openai.AuthenticationError):
            guarded.openai().completions.create(model="chatty", **COMPLETION)


def test_the_log_has_a_line_for_a_request_and_nothing_of_what_was_said(served: Served) -> None:
    response = served.http.post(
        "/v1/completions", json={**COMPLETION, "prompt": "a secret"}, headers={"x-request-id": "abc123"}
    )
    assert response.headers["x-request-id"] == "abc123"
    deadline = time.monotonic() + GUARD
    while "abc123" not in (log := served.log.read_text()):  # the line comes after the answer
        assert time.monotonic() < deadline
        time.sleep(0.01)
    (line,) = [line for line in log.splitlines() if "abc123" in line]
    entry = json.loads(line)
    assert (entry["path"], entry["status"], entry["method"]) == ("/v1/completions", 200, "POST")
    assert "secret" not in log


def _client(body: dict[str, Any]) -> dict[str, Any]:
    """Fields as the openai client takes them."""
    own = {k: v for k, v in body.items() if k != "ignore_eos"}
    return {**own, "extra_body": {"ignore_eos": True}} if "ignore_eos" in body else own


def test_without_the_extra_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["serve"]) == 1
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and "pip install 'qwen-rs[serve]'" in line
