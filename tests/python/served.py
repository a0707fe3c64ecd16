"""A server in a process of its own, with the demo model, and what tests ask of it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
from conftest import DEMO, GOLDEN

GUARD = 60.0
"""Seconds after which a test that waits has hung."""


class Served:
    """A running server."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log: Path) -> None:
        self.process, self.url, self.log = process, url, log
        self.http = httpx.Client(base_url=url, timeout=GUARD, trust_env=False)

    def openai(self, **options: Any) -> openai.OpenAI:
        settings = {"api_key": "none", "max_retries": 0, "timeout": GUARD} | options
        return openai.OpenAI(
            base_url=f"{self.url}/v1", http_client=httpx.Client(trust_env=False, timeout=GUARD), **settings
        )

    def post(self, path: str, body: Any) -> httpx.Response:
        if isinstance(body, bytes):
            return self.http.post(path, content=body)
        return self.http.post(path, json=body)

    def metric(self, name: str) -> float:
        text = self.http.get("/metrics").text
        return sum(float(value) for value in re.findall(rf"^qwen_rs:{name}(?:\{{.*\}})? (\S+)$", text, re.M))


def chatting(folder: Path) -> Path:
    """The demo with a chat template."""
    shutil.copytree(DEMO, folder)
    template = (GOLDEN / "chat" / "chat_template.jinja").read_text(encoding="utf-8")
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder


@contextlib.contextmanager
def serving(model: Path, log: Path, *options: str) -> Iterator[Served]:
    command = [sys.executable, "-m", "qwen_rs", "serve", "--model", str(model), "--port", "0"]
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            [*command, "--threads", "1", *options],
            stderr=stderr,
            stdout=subprocess.PIPE,
            env=dict(os.environ),
        )
    try:
        deadline = time.monotonic() + GUARD
        while (found := re.search(r" at (https?://\S+)/v1,", log.read_text())) is None:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)
        yield Served(process, found[1], log)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def events(text: str) -> list[dict[str, Any]]:
    """What the frames of a stream say; the last one must be the end."""
    frames = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert frames.pop() == "[DONE]"
    return [json.loads(frame) for frame in frames]
