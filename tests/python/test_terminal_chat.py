"""``qwen-rs chat``: through a pipe, and in a terminal of its own."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from served import chatting

from qwen_rs import LLM, SamplingParams

SAID = ["Who is Emma?", "And Mr. Knightley?"]
OPTIONS = ["--seed", "5", "--max-tokens", "20", "--no-think", "--threads", "1"]
GUARD = 30.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chatting(tmp_path_factory.mktemp("terminal") / "chatty")


def piped(folder: Path, lines: list[str], *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "qwen_rs", "chat", "--model", str(folder), *OPTIONS, *options]
    text = "".join(f"{line}\n" for line in lines)
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=GUARD, check=False)


def expected(folder: Path, said: list[str], system: str | None = None) -> list[str]:
    llm = LLM(folder, threads=1)
    params = SamplingParams(seed=5, max_tokens=20)
    messages: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
    answers = []
    for text in said:
        messages.append({"role": "user", "content": text})
        answers.append(llm.chat(messages, params, enable_thinking=False).content)
        messages.append({"role": "assistant", "content": answers[-1]})
    return answers


def test_each_line_of_a_pipe_is_a_turn(folder: Path, tmp_path: Path) -> None:
    saved = tmp_path / "saved.json"
    run = piped(folder, [*SAID, "/stats", f"/save {saved}"], "--system", "Be brief.")
    assert run.returncode == 0, run.stderr
    answers = expected(folder, SAID, "Be brief.")
    assert run.stdout == "".join(answer.rstrip("\n") + "\n" for answer in answers)
    messages = json.loads(saved.read_text(encoding="utf-8"))
    assert [m["content"] for m in messages] == ["Be brief.", SAID[0], answers[0], SAID[1], answers[1]]
    # The second turn starts from what the first one left.
    prompt, cached = map(int, re.findall(r"prompt (\d+) tokens, (\d+) of them", run.stderr)[0])
    llm = LLM(folder, threads=1)
    first, second = (
        llm.chat_prompt(messages[:end], enable_thinking=False).token_ids for end in (2, len(messages) - 1)
    )
    common = next(i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    assert prompt == len(second) and cached == common > 20  # the template says the thinking's end once only


def test_a_conversation_is_loaded_and_goes_on(folder: Path, tmp_path: Path) -> None:
    saved = tmp_path / "saved.json"
    answers = expected(folder, SAID)
    assert piped(folder, [SAID[0], f"/save {saved}"]).returncode == 0
    run = piped(folder, [f"/load {saved}", SAID[1]])
    assert run.stdout == answers[1].rstrip("\n") + "\n"
    assert not list(tmp_path.glob("*.part"))


def test_another_answer_is_another_one_and_repeatable(folder: Path) -> None:
    one, two = (piped(folder, [SAID[0], "/regenerate", "/regenerate"]).stdout for _ in range(2))
    assert one == two
    lines = one.splitlines()
    assert one.startswith(expected(folder, SAID[:1])[0].rstrip("\n")) and len(set(lines)) == len(lines)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/nothing", "there is no /nothing"),
        ("/regenerate", "there is no answer yet"),
        ("/stats", "there is no whole answer yet"),
        ("/save", "/save needs a file's name"),
        ("/load", "/load needs a file's name"),
        ("/load /nowhere/at/all", "/nowhere/at/all: No such file or directory"),
        ("/save /nowhere/at/all", "/nowhere/at/all: No such file or directory"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_nothing_is_lost(folder: Path, line: str, message: str) -> None:
    run = piped(folder, [line, SAID[0]])
    assert run.returncode == 0
    assert len(run.stderr.splitlines()) <= 2 and message in run.stderr  # and that the answer was cut off
    assert run.stdout == expected(folder, SAID[:1])[0].rstrip("\n") + "\n"


def test_a_file_that_holds_no_conversation_is_one_line_and_nothing_is_lost(
    folder: Path, tmp_path: Path
) -> None:
    contents = [b'{"a": 1}', b"[", b"[]", b'[{"role": "user", "content": "x"}]', b"\xff", b"[" * 100_000]
    for i, content in enumerate(contents):
        (tmp_path / f"{i}.json").write_bytes(content)
    lines = [f"/load {tmp_path / f'{i}.json'}" for i in range(len(contents))]
    run = piped(folder, [SAID[0], *lines, SAID[1]])
    assert run.returncode == 0
    assert run.stderr.count("no conversation") == len(contents)
    assert len(run.stderr.splitlines()) <= len(contents) + 2
    assert run.stdout == "".join(answer.rstrip("\n") + "\n" for answer in expected(folder, SAID))


def test_a_model_without_a_template_holds_no_conversation() -> None:
    run = piped(Path("demo"), ["Hi"])
    assert run.returncode == 2 and "no chat template" in run.stderr and len(run.stderr.splitlines()) == 1


def test_a_terminal_keeps_the_program_when_an_answer_is_stopped(folder: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "qwen_rs",
        "chat",
        "--model",
        str(folder),
        "--no-think",
        "--threads",
        "1",
    ]
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ["TERM"] = "xterm"
        os.execv(sys.executable, command)
    seen = b""

    def until(pattern: bytes) -> bytes:
        nonlocal seen
        deadline = time.monotonic() + GUARD
        while not (found := re.search(pattern, seen, re.S)):
            assert time.monotonic() < deadline, seen
            if select.select([terminal], [], [], 0.2)[0]:
                seen = re.sub(rb"\x1b\[[0-9;?]*[a-mo-zA-Z]", b"", seen + os.read(terminal, 65536))
                if b"\x1b[6n" in seen:  # where is the cursor?
                    os.write(terminal, b"\x1b[1;1R")
                    seen = seen.replace(b"\x1b[6n", b"")
        text, seen = seen[: found.end()], seen[found.end() :]
        return text

    try:
        until(rb"Ctrl-D ends.*>")
        os.write(terminal, b"Who is Emma?\r")
        until(rb"Emma\?.*[a-z]{3,}.*[a-z]{3,}")
        time.sleep(0.1)
        os.kill(pid, signal.SIGINT)
        until(rb"stopped.*>")
        os.write(terminal, b"/think\r")
        until(rb"think.*>")
        os.write(terminal, b"\x04")
        deadline = time.monotonic() + GUARD
        while os.waitpid(pid, os.WNOHANG) == (0, 0):
            assert time.monotonic() < deadline
            if select.select([terminal], [], [], 0.1)[0]:
                with contextlib.suppress(OSError):
                    os.read(terminal, 65536)
        pid = 0
    finally:
        if pid:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        os.close(terminal)
