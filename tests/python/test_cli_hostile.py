"""The command line against hostile values of every option, and standard streams that do not work."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import DEMO
from test_cli import one_line, run

from qwen_rs import bench, cli

HUGE = str(10**23)
VALUES = [
    *("", " ", "0", "-1", "-", ",", "=", HUGE, f"-{HUGE}", str(2**63), str(2**64 - 1), str(2**64)),
    *("1e-308", "1e308", "-1e308", "1e400", "nan", "inf", "-inf", "0x10", "1_0", "1,x", "9" * 5000),
    *("\N{ARABIC-INDIC DIGIT ONE}", "\N{SNOWMAN}"),
    *("\udcff\udcfe", "\ud800", "a\0b", "two\nlines", "\x1b[31m", "~nobody-at-all", "~nobody-at-all/x"),
]  # fmt: skip
GENERATE = ["generate", "--prompt", "Emma", "--max-tokens", "2", "--seed", "1", "--metrics", "none"]
BENCH = ["bench", "-p", "3", "-d", "0", "-b", "1", "-r", "1", "--threads", "1"]
NOTICE = re.compile(r"No --model given|warning: ")
INTEGERS = {
    "generate": ["--max-tokens", "--top-k", "--seed", "--threads"],
    "bench": ["--prefill", "--depth", "--batch", "--threads", "--repetitions"],
}


def options(command: str) -> list[str]:
    """Every long option that takes a value, from the help."""
    text = run(command, "--help").stdout
    return sorted(set(re.findall(r"^ .*?(--[a-z-]+) [A-Z{\[]", text, re.MULTILINE)))


def main(args: list[str], capfd: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    """Status and lines on standard error, without the notices."""
    status = cli.main(args)
    lines = [line for line in capfd.readouterr().err.splitlines() if not NOTICE.match(line)]
    return status, lines


def test_the_help_names_the_options_that_the_tests_try() -> None:
    assert set(INTEGERS["generate"]) < set(options("generate")) and len(options("generate")) >= 14
    assert set(INTEGERS["bench"]) < set(options("bench")) and len(options("bench")) >= 11


@pytest.mark.parametrize("command", ["generate", "bench"])
def test_every_option_takes_hostile_values(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """One line and status 1 or 2, or it works; in this process an exception would come through."""
    monkeypatch.chdir(tmp_path)  # what --json and --plot write
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(bench.Bench, "ceilings", lambda self, tries=3: (1e10, 1e11, 1e11))
    monkeypatch.setattr(bench, "_plot", lambda figures: b"")
    base = GENERATE if command == "generate" else BENCH
    for option in options(command):
        for value in VALUES:
            status, lines = main([*base, f"{option}={value}"], capfd)
            said = (option, value[:40], lines)
            assert status in (0, 1, 2), said
            assert len(lines) == (status != 0), said
            if status:
                assert lines[0].startswith(f"qwen-rs {command}: "), said
                assert "PosixPath" not in lines[0] and "Errno" not in lines[0], said


@pytest.mark.parametrize(
    ("command", "option"), [(command, option) for command in INTEGERS for option in INTEGERS[command]]
)
@pytest.mark.parametrize("value", [HUGE, f"-{HUGE}", "9" * 5000])
def test_an_integer_out_of_range_is_usage_and_named(
    command: str, option: str, value: str, capfd: pytest.CaptureFixture[str]
) -> None:
    base = GENERATE if command == "generate" else BENCH
    status, lines = main([*base, f"{option}={value}"], capfd)
    assert status == 2 and len(lines) == 1
    assert option in lines[0]
    assert len(lines[0]) < 400  # 5000 digits are not repeated


@pytest.mark.parametrize("text", [b"Emma \xff", b"\xc3", b"\xed\xa0\x80"])
def test_text_that_is_not_utf_8_names_the_option(text: bytes) -> None:
    for option in (b"--prompt", b"--stop"):
        result = subprocess.run(
            [sys.executable, "-m", "qwen_rs", "generate", "--max-tokens", "2", option, text],
            capture_output=True,
            text=True,
            timeout=60,
        )
        one_line(result, 2, option.decode(), "UTF-8")
        assert "tokenizer" not in result.stderr


@pytest.mark.parametrize("environment", [{}, {"LC_ALL": "C"}, {"PYTHONIOENCODING": "utf-8:surrogateescape"}])
def test_standard_input_that_is_not_utf_8_is_named(environment: dict[str, str]) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "qwen_rs", "generate", "--max-tokens", "2", "--prompt", "-"],
        input=b"Emma \xff\xfe",
        capture_output=True,
        timeout=60,
        env=os.environ | environment,
    )
    assert result.returncode == 2 and result.stdout == b""
    assert result.stderr.count(b"\n") == 1
    assert b"standard input" in result.stderr and b"UTF-8" in result.stderr


@pytest.mark.parametrize(
    "environment",
    [
        {"PYTHONIOENCODING": "ascii"},
        {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
        {"PYTHONIOENCODING": "ascii:strict"},
    ],
)
def test_a_character_that_the_output_cannot_show_is_replaced_with_one_warning(
    environment: dict[str, str],
) -> None:
    # So hot that bytes come which are no characters: U+FFFD, more than once.
    args = ["generate", "--prompt", "“Emma”", "--max-tokens", "100", "--seed", "3"]
    args += ["--temperature", "50", "--top-k", "0", "--top-p", "1"]
    plain = run(*args)
    assert not plain.stdout.isascii()
    result = run(*args, **environment)
    assert result.returncode == 0
    assert result.stdout == plain.stdout.encode("ascii", "backslashreplace").decode()
    warnings = [line for line in result.stderr.splitlines() if line.startswith("warning:")]
    assert len(warnings) == 1 and "ascii" in warnings[0]
    document = json.loads(run(*args, "--metrics", "json", **environment).stderr)
    assert document["notices"][-1] == warnings[0]


def test_metrics_as_json_are_all_of_standard_error() -> None:
    """With every notice that there is: the demo's, threads, and what --trace-ops adds."""
    many = str(os.cpu_count() or 1)
    args = ["generate", "--max-tokens", "3", "--temperature", "0", "--threads", str(8 * int(many))]
    result = run(*args, "--metrics", "json")
    metrics = json.loads(result.stderr)
    assert [notice.split()[0] for notice in metrics["notices"]] == ["No", "warning:"]
    assert "ops" not in metrics
    traced = json.loads(run(*args, "--metrics", "json", "--trace-ops").stderr)
    assert {"phase", "op", "calls", "milliseconds"} == set(traced["ops"][0])
    quiet = run(
        "generate", "--model", str(DEMO), "--prompt", "Emma", "--max-tokens", "3", "--metrics", "json"
    )
    assert json.loads(quiet.stderr)["notices"] == []


def test_an_error_with_json_metrics_is_one_line() -> None:
    one_line(run("generate", "--metrics", "json", "--top-p", "7"), 2, "top_p")
    one_line(run("generate", "--metrics", "json", "--model", "/no/such", "--prompt", "x"), 1, "/no/such")


def redirected(redirection: str, *args: str, unbuffered: str = "") -> subprocess.CompletedProcess[str]:
    """The command with a shell's redirection of its standard streams."""
    command = [sys.executable, "-m", "qwen_rs", *args]
    result = subprocess.run(
        ["sh", "-c", f'exec "$0" "$@" {redirection}', *command],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
    )
    for sign in ("Traceback", "Exception ignored", "Error:", "Errno"):
        assert sign not in result.stderr, result.stderr
    return result


RUNS = [
    ["generate", "--prompt", "Emma", "--seed", "1", "--max-tokens", "5"],
    [*BENCH],
    ["generate", "--help"],
    ["--version"],
]


@pytest.mark.parametrize("args", RUNS, ids=lambda args: args[0] + args[-1])
def test_standard_output_that_takes_nothing(args: list[str]) -> None:
    for redirection, unbuffered in ((">&-", ""), (">&- <&-", ""), (">/dev/full", ""), (">/dev/full", "1")):
        result = redirected(redirection, *args, unbuffered=unbuffered)
        if "-" in args[-1] and ">&-" in redirection:
            continue  # argparse's help goes to standard error then
        lines = [line for line in result.stderr.splitlines() if not NOTICE.match(line)]
        assert result.returncode == 1, redirection
        assert len(lines) == 1 and "standard output" in lines[0], lines


@pytest.mark.parametrize("args", [*RUNS, ["generate", "--top-k", "x"]], ids=lambda args: args[0] + args[-1])
def test_standard_error_that_takes_nothing(args: list[str]) -> None:
    plain = redirected("", *args)
    closed = redirected("2>&-", *args)
    assert closed.returncode == plain.returncode
    if args[0] == "generate":  # the notices do not end up in the text
        assert closed.stdout == plain.stdout
    full = redirected("2>/dev/full", *args)
    assert full.returncode in (1, 2) if plain.stderr else full.returncode == 0


@pytest.mark.parametrize("args", RUNS, ids=lambda args: args[0] + args[-1])
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_pipe_whose_reader_is_gone(args: list[str], stream: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    other = "stderr" if stream == "stdout" else "stdout"
    process = subprocess.run(
        [sys.executable, "-m", "qwen_rs", *args],
        timeout=60,
        text=True,
        **{stream: writer, other: subprocess.PIPE},  # type: ignore[call-overload]
    )
    os.close(writer)
    if stream == "stdout":
        lines = [line for line in process.stderr.splitlines() if not NOTICE.match(line)]
        assert process.returncode == 1
        assert len(lines) == 1 and lines[0].endswith("standard output was closed")
    else:
        assert process.returncode in (0, 1)


def test_standard_input_that_gives_nothing() -> None:
    args = ["generate", "--max-tokens", "3", "--prompt", "-"]
    for redirection, status, part in (
        ("<&-", 1, "closed"),
        ("</dev/null", 2, "empty"),
        ("</dev/zero", 2, "larger"),
    ):
        result = redirected(redirection, *args)
        one_line(result, status, part)
        if status == 1 or part == "larger":
            assert "standard input" in result.stderr
    closed = redirected("<&-", "generate", "--prompt", "Emma", "--max-tokens", "3", "--seed", "1")
    assert closed.returncode == 0 and closed.stdout  # nobody asked for it
    assert redirected("<&- >&- 2>&-", "generate", "--max-tokens", "3").returncode == 1


def test_a_home_that_is_nobodys_is_named() -> None:
    for model in ("~nobody-at-all", "~nobody-at-all/model"):
        one_line(run("generate", "--model", model, "--prompt", "x", HF_HUB_OFFLINE="1"), 1, model)


def test_a_checkpoint_whose_path_is_not_utf_8_loads(tmp_path: Path) -> None:
    path = shutil.copytree(DEMO, os.fsdecode(os.fsencode(tmp_path) + b"/mod\xffel"))
    result = run("generate", "--model", path, "--prompt", "Emma", "--max-tokens", "3", "--seed", "1")
    assert result.returncode == 0 and result.stdout


def test_the_package_runs_as_a_module() -> None:
    result = subprocess.run([sys.executable, "-m", "qwen_rs", "--help"], capture_output=True, text=True)
    assert result.returncode == 0 and result.stdout.startswith("usage: qwen-rs ")
    error = subprocess.run([sys.executable, "-m", "qwen_rs", "generate", "--nothing"], capture_output=True)
    assert error.returncode == 2 and error.stderr.startswith(b"qwen-rs: ")
