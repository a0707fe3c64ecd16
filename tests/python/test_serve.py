"""The server gives each request what ``LLM.generate`` and ``LLM.chat`` give it alone, to real clients."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from served import Served, chatting, events, serving

from qwen_rs import LLM, SamplingParams

PROMPTS = ["It is a truth", "Emma Woodhouse", "Mr. Darcy smiled, and", "She was", "\N{SNOWMAN} No", "Why"]
SETTINGS: dict[str, Any] = {"max_tokens": 24, "temperature": 0.9, "seed": 7}
MESSAGES: list[Any] = [{"role": "user", "content": "Who is Emma?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chatting(tmp_path_factory.mktemp("served") / "chatty")


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, threads=1)


@pytest.fixture(scope="module")
def served(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(folder, tmp_path_factory.mktemp("log") / "log") as server:
        yield server


def chosen(llm: LLM, output: Any) -> list[float]:
    return [row[token] for token, row in zip(output.token_ids, output.logprobs, strict=True)]


def test_completions_are_those_of_generate_many_at_once(served: Served, llm: LLM) -> None:
    client = served.openai()

    def ask(prompt: str) -> Any:
        return client.completions.create(model="chatty", prompt=prompt, logprobs=2, **SETTINGS)

    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(ask, PROMPTS * 2))
    for prompt, answer in zip(PROMPTS * 2, answers, strict=True):
        alone = llm.generate(prompt, SamplingParams(**SETTINGS, logprobs=2))
        (choice,) = answer.choices
        assert choice.text == alone.text and choice.finish_reason == alone.finish_reason
        assert choice.logprobs.token_logprobs == chosen(llm, alone)
        assert answer.usage.prompt_tokens == len(alone.prompt_token_ids)
        assert answer.usage.completion_tokens == len(alone.token_ids)
        assert choice.model_extra["seed"] == 7


def test_a_streamed_completion_is_the_whole_one(served: Served, llm: LLM) -> None:
    client = served.openai()
    for prompt in PROMPTS:
        alone = llm.generate(prompt, SamplingParams(**SETTINGS, logprobs=0))
        stream = client.completions.create(
            model="chatty",
            prompt=prompt,
            stream=True,
            logprobs=0,
            stream_options={"include_usage": True},
            **SETTINGS,
        )
        *chunks, usage = list(stream)
        choices = [chunk.choices[0] for chunk in chunks]
        assert "".join(choice.text for choice in choices) == alone.text
        assert [choice.finish_reason for choice in choices[:-1]] == [None] * (len(choices) - 1)
        assert choices[-1].finish_reason == alone.finish_reason
        told = [value for choice in choices for value in choice.logprobs.token_logprobs]
        assert told == chosen(llm, alone)
        assert usage.choices == [] and usage.usage.completion_tokens == len(alone.token_ids)
        assert len(choices) > 3


def test_chats_are_those_of_chat_streamed_and_not(served: Served, llm: LLM) -> None:
    client = served.openai()
    alone = llm.chat(MESSAGES, SamplingParams(**SETTINGS, logprobs=3))
    answer = client.chat.completions.create(
        model="chatty", messages=MESSAGES, logprobs=True, top_logprobs=3, **SETTINGS
    )
    (choice,) = answer.choices
    assert choice.message.content == alone.content and choice.message.role == "assistant"
    assert choice.finish_reason == alone.finish_reason
    assert [row.logprob for row in choice.logprobs.content] == chosen(llm, alone)
    for row, expected in zip(choice.logprobs.content, alone.logprobs, strict=True):
        top = sorted(expected.values(), reverse=True)[:3]
        assert [other.logprob for other in row.top_logprobs] == top
        assert bytes(row.bytes).decode(errors="replace") == row.token
    chunks = list(client.chat.completions.create(model="chatty", messages=MESSAGES, stream=True, **SETTINGS))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == alone.content
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons == [None] * (len(reasons) - 1) + [alone.finish_reason]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert all(chunk.usage is None for chunk in chunks)
    assert answer.system_fingerprint == chunks[0].system_fingerprint
    assert answer.system_fingerprint.startswith("fp_")


def test_the_model_is_listed_and_the_server_is_well(served: Served) -> None:
    client = served.openai()
    assert [model.id for model in client.models.list()] == ["chatty"]
    assert client.models.retrieve("chatty").id == "chatty"
    assert served.http.get("/health").json() == {"status": "ok"}


def test_every_frame_is_json_and_the_last_is_done(served: Served) -> None:
    response = served.post("/v1/completions", {"prompt": "Emma", "stream": True, **SETTINGS})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert all(frame["object"] == "text_completion" for frame in events(response.text))


def test_tokenize_and_detokenize_are_the_tokenizer_s(served: Served, llm: LLM) -> None:
    for prompt in (*PROMPTS, "", "<|im_start|>x"):
        answer = served.post("/tokenize", {"prompt": prompt}).json()
        assert answer["tokens"] == llm.tokenizer.encode(prompt) and answer["count"] == len(answer["tokens"])
        assert served.post("/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": prompt}
    for tokens in ([-1], [10**9], [1.5], "a"):
        assert served.post("/detokenize", {"tokens": tokens}).status_code == 400


def test_24_echo_tells_the_prompt_s_log_probabilities_cold_and_warm(served: Served, llm: LLM) -> None:
    """As lm-evaluation-harness asks: lists of token ids, one token more, the likeliest beside each."""
    prompts = [llm.tokenizer.encode(prompt * 40) for prompt in PROMPTS[:2]]
    body = {"prompt": prompts, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0, "seed": 1}
    served.post("/v1/completions", {**body, "echo": False})
    answers = [served.post("/v1/completions", body).json()["choices"] for _ in range(2)]
    assert [c["logprobs"] for c in answers[0]] == [c["logprobs"] for c in answers[1]]
    for ids, choice in zip(prompts, answers[0], strict=True):
        rows = choice["logprobs"]
        assert len(rows["token_logprobs"]) == len(rows["tokens"]) == len(ids) + 1
        assert rows["token_logprobs"][0] is None and rows["top_logprobs"][0] is None
        alone = llm.generate(ids[:1], SamplingParams(max_tokens=1, logprobs=4096, temperature=0)).logprobs
        assert alone is not None and rows["token_logprobs"][1] == alone[0][ids[1]]
        assert choice["text"].startswith(llm.tokenizer.decode(ids))
