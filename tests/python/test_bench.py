"""``qwen-rs bench``: what it measures adds up, and what it refuses it refuses before the work."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from test_cli import one_line, run


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


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs the plot extra")
def test_the_plot_is_a_png(tmp_path: Path) -> None:
    path = tmp_path / "bench.png"
    result = run("bench", "-p", "17", "-d", "0,64", "-b", "1", "-r", "1", "--plot", str(path))
    assert result.returncode == 0, result.stderr
    assert path.read_bytes().startswith(b"\x89PNG")
