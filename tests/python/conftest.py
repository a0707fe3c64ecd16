"""What several test files need."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

import qwen_rs
from qwen_rs import LLM, Model

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
DEMO = Path(qwen_rs.__file__).parent / "demo"
CHECKPOINTS = sorted(path.parent.name for path in GOLDEN.glob("*/golden.npz"))


# Started in the background by a shell, this process would ignore Ctrl-C, and so would its children:
# the tests send it, so it is switched on.
signal.signal(signal.SIGINT, signal.default_int_handler)


_figures: list[str] = []


def report(figure: str) -> None:
    """Prints a measured figure at the end of the run."""
    _figures.append(figure)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _figures:
        terminalreporter.section("figures")
        for figure in _figures:
            terminalreporter.line(figure)


@pytest.fixture(scope="session")
def demo() -> LLM:
    return LLM("demo")


@pytest.fixture(scope="session")
def demo_f32() -> Model:
    return Model.load(DEMO, dtype="f32")
