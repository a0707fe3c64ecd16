"""Where chat templates render: a process of their own, which the operating system limits.

A template comes with a checkpoint, from anyone, and jinja2 computes whatever it says: no list of forbidden
operations bounds what the others can do together. So jinja2 runs in a child process (``render_child.py``),
with the messages and nothing else, a second of CPU time and a bound on its memory.
"""

from __future__ import annotations

import importlib.util
import os
import struct
import subprocess
import sys
import threading
import weakref
from contextlib import suppress
from pathlib import Path

from .render_child import CPU_SECONDS, MAX_TEXT, MEMORY

WALL_SECONDS = 30.0
"""Where the system does not limit CPU time (Windows), and for a child that is stopped."""
# What an interpreter needs to start, and the time zone; no tokens, no settings of this program.
ENVIRONMENT = ("DYLD_LIBRARY_PATH", "LD_LIBRARY_PATH", "PATH", "SYSTEMROOT", "TZ")


class TemplateError(Exception):
    """A template does not parse, cannot render, or takes too much; the reason in one line."""


class Renderer:
    """A template that renders in a child process.

    The process is kept between renderings and is started anew after one that broke a limit, and in a
    process that was forked from this one. Threads take turns.
    """

    def __init__(self, source: str) -> None:
        """
        Raises:
            TemplateError: the template does not parse.
            OSError: the process cannot be started.
        """
        self._source = source
        self._lock = threading.Lock()
        self._process_id = os.getpid()
        self._child: _Child | None = _Child(source)

    def render(self, variables: str) -> str:
        """The text for variables in JSON.

        Raises:
            TemplateError: the template cannot render.
            OSError: the process cannot be started.
        """
        if self._process_id != os.getpid():
            # Forked: the child is the parent's, and a thread that held the lock is not here.
            self._lock = threading.Lock()
            self._process_id = os.getpid()
            self._child = None
        with self._lock:
            if self._child is None:
                self._child = _Child(self._source)
            try:
                return self._child.ask(variables)
            finally:
                if self._child.ended:
                    self._child = None


class _Child:
    """The process, with its template."""

    def __init__(self, source: str) -> None:
        if not sys.executable or getattr(sys, "frozen", False):
            raise OSError("a chat template needs a Python interpreter to render in, and here is none")
        places = []
        for library in ("jinja2", "markupsafe"):
            spec = importlib.util.find_spec(library)
            if spec is None or spec.origin is None:
                raise ImportError(f"chat templates need {library}")
            places.append(str(Path(spec.origin).parents[1]))
        script = Path(__file__).with_name("render_child.py")
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(script), *places],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
            start_new_session=True,  # a Ctrl-C of the terminal is not for it
            creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
        )
        self.ended = False
        self._end = weakref.finalize(self, _end, self._process, os.getpid())
        self.ask(source)

    def ask(self, request: str) -> str:
        """The reply to a request."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            data = request.encode("utf-8")
            watch = threading.Timer(WALL_SECONDS, self._process.kill)
            watch.daemon = True
            try:
                watch.start()
            except RuntimeError as error:  # no more threads
                raise OSError(f"the chat template's renderer cannot be watched: {error}") from None
            try:
                self._process.stdin.write(struct.pack(">Q", len(data)) + data)
                self._process.stdin.flush()
                head = self._process.stdout.read(9)
                kind, size = struct.unpack(">cQ", head) if len(head) == 9 else (b"", 0)
                reply = self._process.stdout.read(size) if size <= MAX_TEXT else b""
            except BrokenPipeError:
                kind, size, reply = b"", 0, b""
            finally:
                watch.cancel()
            if kind == b"T" and len(reply) == size:
                return reply.decode("utf-8")
            if kind == b"E":
                raise TemplateError(" ".join(reply.decode("utf-8").split()) or "no reason is given")
        except TemplateError:
            raise
        except BaseException:  # Ctrl-C among them: what it still replies would be taken for the next reply
            self.end()
            raise
        self.end()
        if kind == b"M":
            raise TemplateError(f"it needs more than {MEMORY >> 20} MB")
        raise TemplateError(f"it takes more than {CPU_SECONDS} s of CPU time, or its process was killed")

    def end(self) -> None:
        self.ended = True
        self._end()


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    if owner != os.getpid():
        return  # a forked process: the child is its parent's
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(BrokenPipeError):  # what was not sent has no reader
                pipe.close()
    process.wait()
