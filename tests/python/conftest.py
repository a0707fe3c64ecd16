"""What several test files need."""

from __future__ import annotations

from pathlib import Path

import pytest

import qwen_rs
from qwen_rs import LLM, Model

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
DEMO = Path(qwen_rs.__file__).parent / "demo"
CHECKPOINTS = sorted(path.parent.name for path in GOLDEN.glob("*/golden.npz"))


@pytest.fixture(scope="session")
def demo() -> LLM:
    return LLM("demo")


@pytest.fixture(scope="session")
def demo_f32() -> Model:
    return Model.load(DEMO, dtype="f32")
