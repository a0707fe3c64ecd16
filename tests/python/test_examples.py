"""Every program of ``python/examples`` runs on the demo model."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import DEMO

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "python" / "examples").glob("*.py"))
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 4


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(path: Path, tmp_path: Path) -> None:
    args = []
    if path.stem == "chat":  # the demo, and a template
        model = Path(shutil.copytree(DEMO, tmp_path / "model"))
        (model / "chat_template.jinja").write_text(TEMPLATE)
        args = [str(model)]
    result = subprocess.run(
        [sys.executable, str(path), *args], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == "" and len(result.stdout) > 20
