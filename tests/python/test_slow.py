"""The shape of the real 0.6B model, with random weights: minutes, so behind ``-m slow``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import report

from qwen_rs import available_isas

pytestmark = pytest.mark.slow
BENCHMARKS = Path(__file__).resolve().parents[2] / "python" / "benchmarks"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("qwen3") / "0.6b"
    script = BENCHMARKS / "random_checkpoint.py"
    subprocess.run([sys.executable, str(script), "0.6b", str(directory)], check=True)
    return directory


def run(program: str, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return result.stdout


def test_every_instruction_set_gives_the_same_bits(checkpoint: Path) -> None:
    program = f"""
import hashlib
from qwen_rs import Model
model = Model.load({str(checkpoint)!r})
digest = hashlib.sha256()
for kv in ("f32", "f16"):
    cache = model.new_cache(kv_dtype=kv)
    digest.update(model.prefill(cache, [7 * i for i in range(30)]).tobytes())
    for token in range(3):
        digest.update(model.decode(cache, token).tobytes())
print(digest.hexdigest())
"""
    assert len({run(program, QWEN_RS_ISA=isa) for isa in available_isas()}) == 1


def test_loading_takes_little_more_memory_than_the_packed_weights(checkpoint: Path) -> None:
    program = f"""
import json
from qwen_rs import Model
from qwen_rs.engine.metrics import peak_rss_bytes
before = peak_rss_bytes()
model = Model.load({str(checkpoint)!r})
print(json.dumps([before, peak_rss_bytes(), model.weight_bytes]))
"""
    before, peak, weights = json.loads(run(program))
    layer = 2 * (2048 * 1024 * 2 + 1024 * 1024 * 2 + 3 * 3072 * 1024)  # BF16 bytes
    report(f"before {before / 1e6:.0f} MB, peak {peak / 1e6:.0f} MB, packed weights {weights / 1e6:.0f} MB")
    assert peak - before <= 1.1 * weights + layer
