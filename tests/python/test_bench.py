"""``qwen-rs bench``: what it measures adds up, and what it refuses it refuses before the work."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from test_cli import one_line, run

from qwen_rs import available_isas, bench, cli


def test_every_figure_is_measured_beside_its_ceiling(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    sizes = ["-p", "17,300", "-d", "0,64", "-b", "1,3", "-r", "2", "--threads", "1,2"]
    result = run("bench", *sizes, "--kv-dtype", "f16", "--json", str(path))
    assert result.returncode == 0, result.stderr
    figures = json.loads(path.read_text())
    names = ["prefill 17", "prefill 300", "decode @0", "decode @64", "batch 1", "batch 3"]
    assert [(f["threads"], f["name"]) for f in figures] == [(t, n) for t in (1, 2) for n in names]
    for f in figures:
        assert 0 < f["low"] <= f["tokens_per_second"] <= f["high"]
        assert f["share"] == pytest.approx(f["achieved"] / f["ceiling"])
        assert f["name"] in result.stdout
        assert (f["model"], f["dtype"], f["kv"], f["kv_dtype"]) == ("demo", "q8_0", "basic", "f16")
    token = 6 * 2 * 2 * 64 * 2  # layers x (K, V) x heads x head_dim x bytes of F16
    at = {f["name"]: f["step_bytes"] for f in figures}
    assert at["decode @64"] - at["decode @0"] == 63 * token  # depth 0 is measured after one token
    assert at["batch 3"] - at["batch 1"] == 2 * 136 * token


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["-r", "0"], ["repetitions"]),
        (["-p", "0"], ["at least 1"]),
        (["-p", "x"], ["--prefill"]),
        (["-d", "5000"], ["context of 2048"]),
        (["--threads", "0"], ["threads"]),
        (["--shape", "9b"], ["--shape"]),
    ],
)
def test_wrong_usage_gets_one_line(args: list[str], parts: list[str]) -> None:
    one_line(run("bench", *args), 2, *parts)


def test_a_file_that_cannot_be_written_is_said_before_the_work() -> None:
    one_line(run("bench", "--json", "/no/such/dir/x.json"), 1, "/no/such/dir")


ONE = ["bench", "-p", "17", "-d", "0,64", "-b", "1", "-r", "1", "--threads", "1"]


def test_the_table_and_every_figure_say_what_ran_where_and_when(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    result = run(*ONE, "--dtype", "f32", "--json", str(path))
    assert result.returncode == 0, result.stderr
    header = result.stdout.partition("figure")[0]
    for figure in json.loads(path.read_text()):
        assert (figure["model"], figure["dtype"], figure["isa"]) == ("demo", "f32", available_isas()[0])
        assert figure["cpu"] == bench.cpu_name() != ""
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", figure["date"])
        for field in ("model", "dtype", "isa", "kv", "kv_dtype", "cpu", "date"):
            assert figure[field] in header
    assert f"1 threads of {os.cpu_count()} cores" in header


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_a_full_disk_names_the_file(option: str) -> None:
    result = run(*ONE, option, "/dev/full")
    assert result.returncode == 1
    assert result.stderr == "qwen-rs bench: /dev/full: No space left on device\n"


def test_the_plot_is_a_png(tmp_path: Path) -> None:
    path = tmp_path / "a plot.without-an-ending"
    result = run(*ONE, "--plot", str(path))
    assert result.returncode == 0, result.stderr
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_plot_says_what_ran_where_and_when(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib import pyplot

    sheets: list[Any] = []
    monkeypatch.setattr(pyplot, "close", sheets.append)
    data = tmp_path / "x.json"
    assert cli.main([*ONE, "--json", str(data), "--plot", str(tmp_path / "x.png")]) == 0
    title = sheets[0].get_suptitle()
    figure = json.loads(data.read_text())[0]
    for field in ("model", "dtype", "isa", "kv", "kv_dtype", "cpu", "date"):
        assert figure[field] in title
