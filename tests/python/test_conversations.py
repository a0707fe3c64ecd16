"""Conversations: what counts as one, lists of them, and what a chat template leaves out."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import DEMO, GOLDEN

from qwen_rs import LLM, ChatOutput, SamplingParams
from qwen_rs.engine.generation import Generation

FREE = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}
SAMPLED = {"max_tokens": 16, "temperature": 1.0, "ignore_eos": True}
CHAT = (GOLDEN / "chat" / "chat_template.jinja").read_text(encoding="utf-8")
REFUSAL = "{{- raise_exception('unknown role ' + message.role) }}"
DROPPING = CHAT.replace(REFUSAL, "")
"""As Qwen3's own: what has an unknown role is left out."""
QUESTIONS = ["Why is the sky blue?", "Who is Emma?", "\N{SNOWMAN} 你好"]


def asking(question: str, *before: tuple[str, str]) -> list[dict[str, Any]]:
    turns = [*before, ("user", question)]
    return [{"role": role, "content": content} for role, content in turns]


@pytest.fixture(scope="module")
def chatting(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], LLM]:
    """The demo with a chat template."""

    def make(template: str) -> LLM:
        copy = Path(shutil.copytree(DEMO, tmp_path_factory.mktemp("chat") / "m"))
        (copy / "chat_template.jinja").write_text(template, encoding="utf-8")
        return LLM(copy, threads=1)

    return make


@pytest.fixture(scope="module")
def chat(chatting: Callable[[str], LLM]) -> LLM:
    return chatting(DROPPING)


def same(a: Any, b: Any) -> bool:
    return bool(a == replace(b, metrics=a.metrics))


@pytest.mark.parametrize("form", [list, tuple])
def test_a_list_of_conversations_is_a_list_of_answers(
    chat: LLM, form: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    conversations = [
        asking(q, ("system", "Be brief."), ("user", "Hi"), ("assistant", "Yes?")) for q in QUESTIONS
    ]
    conversations.append(asking("Why?"))
    together: list[int] = []
    run = Generation.finish
    monkeypatch.setattr(Generation, "finish", lambda own, s: [together.append(len(s)), run(own, s)][1])
    for params in (SamplingParams(**FREE), SamplingParams(**SAMPLED, seed=5)):
        for thinking in (None, False):
            together.clear()
            answers = chat.chat(form(map(form, conversations)), params, enable_thinking=thinking)
            assert together == [4]
            assert all(isinstance(answer, ChatOutput) for answer in answers)
            one_by_one = [chat.chat(c, params, enable_thinking=thinking) for c in conversations]
            assert all(map(same, answers, one_by_one)) and len(answers) == 4
    assert same(chat.chat([conversations[0]], params)[0], chat.chat(conversations[0], params))
    (first, second), alone = (
        chat.chat([conversations[0]], SamplingParams(**SAMPLED, seed=5, n=2))[0],
        chat.chat(conversations[0], SamplingParams(**SAMPLED, seed=5)),
    )
    assert same(first, alone) and not same(second, alone)
    each = [SamplingParams(**FREE), SamplingParams(max_tokens=2, seed=1)]
    for answer, conversation, params in zip(
        chat.chat(conversations[:2], each), conversations, each, strict=False
    ):
        assert same(answer, chat.chat(conversation, params))


USER = {"role": "user", "content": "Hi"}


@pytest.mark.parametrize(
    "wrong",
    [
        [], (), [[]], [[USER], []], None, 5, "Hi", b"Hi", {}, USER, ["Hi"], [5], [None], iter([USER]),
        {1: USER}, [USER, "Hi"], [USER, [USER]], [[USER], USER], [[USER], "Hi"], [[[USER]]], [["Hi"]],
        [USER, None], [{}], [{"role": "user"}], [{"content": "Hi"}], [{"role": None, "content": "Hi"}],
        [{"role": 5, "content": "Hi"}], [{"role": "user", "contents": "Hi"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": b"Hi"}], [{"role": "user", "content": {"type": "text", "text": "Hi"}}],
        [{"role": "user", "content": iter("Hi")}],
    ],
    ids=repr,
)  # fmt: skip
def test_what_is_no_conversation_is_a_value_error_that_says_what_is_expected(chat: LLM, wrong: Any) -> None:
    for call in (chat.chat, chat.render_chat):
        with pytest.raises(ValueError, match=r"^messages\b.*\b(conversation|messages|text)\b"):
            call(wrong)


def test_content_may_be_a_list_of_text_parts(chat: LLM) -> None:
    def parts(*texts: str) -> Any:
        return [{"type": "text", "text": text} for text in texts]

    for texts in (["Why is the sky blue?"], ["Why", "is the sky", ""], []):
        listed = [
            {"role": "system", "content": parts("Be brief.")},
            {"role": "user", "content": parts(*texts)},
        ]
        plain = asking("\n".join(texts), ("system", "Be brief."))
        assert chat.render_chat(listed) == chat.render_chat(plain)
        assert same(chat.chat(listed, SamplingParams(**FREE)), chat.chat(plain, SamplingParams(**FREE)))
    image = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
    for content, kind in (
        ([*parts("What is this?"), image], "image_url"),
        ([{"type": "input_audio"}], "input_audio"),
        ([{"text": "no type"}], "None"),
        ([{"type": "text", "text": 5}], "text"),
        ([{"type": "text"}], "text"),
        (["Hi"], "str"),
        ([None], "NoneType"),
    ):
        with pytest.raises(ValueError, match=rf"messages\[0\]: content has a part of type '?{kind}"):
            chat.chat([{"role": "user", "content": content}])


@pytest.mark.parametrize("role", ["developer", "assitant", "User", "function", "", "a b'c"])
def test_a_role_that_the_template_leaves_out_is_an_error(chat: LLM, role: str) -> None:
    turn = {"role": role, "content": "Answer in French."}
    calling = {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": {}}]}
    for messages in (
        [turn],
        [turn, USER],
        [USER, turn],
        [USER, turn, USER, turn],
        [USER, calling, turn],
        [{"role": "user", "content": turn["content"]}, turn],  # the same text stands elsewhere
        [{**turn, "content": [{"type": "text", "text": "a"}]}, USER],
    ):
        for call in (chat.chat, chat.render_chat, lambda m: chat.chat([[USER], m])):
            with pytest.raises(ValueError, match=re.escape(repr(role))) as error:
                call(messages)
    assert "it reads system, user, assistant, tool" in str(error.value)


TEMPLATES = {
    "as transformers tests it": DROPPING,
    "refusing": CHAT,
    "changed": "{% for m in messages %}{{ m.role | title }}{{ m.content | upper | tojson }}{% endfor %}",
    "shortened": "{% for m in messages %}{{ m.content[:1] }}{% endfor %}",
    "counted": "{% for m in messages %}{{ m.content | length }}{% endfor %}",
    "the last": "{{ messages[-1].content }}",
    "in turns": "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('user and assistant take turns') }}{% endif %}{{ m.content }}{% endfor %}",
    "no empty one": "{% for m in messages %}{% if m.content %}{{ m.content }}{% endif %}{% endfor %}",
    "the calls alone": "{% for m in messages %}{{ m.tool_calls if m.tool_calls else m.content }}{% endfor %}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_no_alarm_for_what_a_template_changes_or_for_what_is_empty(
    chatting: Callable[[str], LLM], name: str
) -> None:
    llm = chatting(TEMPLATES[name])
    assert llm.chat_template is not None
    calling = {"role": "assistant", "content": "a", "tool_calls": [{"name": "f", "arguments": {}}]}
    conversations: list[list[dict[str, Any]]] = [
        asking("Hi"),
        asking("a"),
        asking("Hi", ("user", "Hi"), ("assistant", "<think>\nhm\n</think>\n\n Hello!  ")),
        asking("Hi", ("user", ""), ("assistant", " \n")),
        asking(""),
    ]
    if name not in ("in turns", "the last"):
        conversations += [asking("Hi", ("system", "")), [USER, calling, {"role": "tool", "content": "5"}]]
        conversations += [[USER, {**calling, "content": None}], [USER, calling, calling]]
    for messages in conversations:
        if name == "in turns":
            messages = messages[1:] if messages[0]["role"] != "user" else messages
        if name == "the last":
            messages = messages[-1:]
        try:
            expected = llm.chat_template.render(messages)
        except ValueError:
            with pytest.raises(ValueError, match="refuses"):
                llm.render_chat(messages)
        else:
            assert llm.render_chat(messages) == expected


def test_no_alarm_for_what_transformers_renders(chat: LLM) -> None:
    cases = json.loads((GOLDEN / "chat" / "rendered.json").read_text(encoding="utf-8"))
    for case in cases:
        options = {k: v for k, v in case["options"].items() if k in ("enable_thinking", "tools")}
        assert chat.chat_template is not None
        assert chat.render_chat(case["messages"], **options) == chat.chat_template.render(
            case["messages"], **options
        )
