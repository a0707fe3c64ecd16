"""The process that renders one chat template: jinja2, set up as transformers sets it up, under limits.

``sandbox.py`` starts this file as a script, in Python's isolated mode, with the directories of its
libraries as arguments; nothing else of the package is imported here.

A request is its length (8 bytes, big-endian) and UTF-8: first the template's source, then the variables of
each rendering as JSON. A reply is one byte for its kind, the length, and UTF-8: ``T``, the text (empty for a
template that parses); ``E``, why there is none; ``M``, there was no memory, after which the process ends.
Time that is used up has no reply: the operating system ends the process.
"""

from __future__ import annotations

import json
import signal
import struct
import sys
from contextlib import suppress
from datetime import datetime
from typing import Any, BinaryIO

CPU_SECONDS = 0.9
"""For parsing, and for each rendering: CPU time, so that a busy machine refuses no more than an idle one."""
MEMORY = 128 << 20
"""Bytes of address space beyond what the interpreter and its libraries take (some 25 million)."""
MAX_TEXT = 16 << 20
"""Bytes of a rendered prompt: far more than any context holds."""


def limit_memory() -> None:
    """Address space alone is a limit that the kernel keeps before memory is touched (Linux, the BSDs;
    macOS takes the call and does not keep to it, Windows has none)."""
    try:
        import resource
    except ImportError:
        return
    taken = 32 << 20
    with suppress(OSError), open("/proc/self/statm", encoding="ascii") as file:
        taken = int(file.read().split()[0]) * resource.getpagesize()
    for kind, most in ((resource.RLIMIT_AS, taken + MEMORY), (resource.RLIMIT_CORE, 0)):
        with suppress(ValueError, OSError):  # a stricter limit is in force
            resource.setrlimit(kind, (most, most))


def limit_time(seconds: float) -> None:
    """SIGPROF, which nothing here handles, ends the process after so much CPU time; 0: no limit."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


def environment() -> Any:
    """jinja2 as transformers' ``_compile_jinja_template`` sets it up."""
    import jinja2
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.nodes import CallBlock, Node
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationBlock(Extension):
        """``{% generation %}`` marks what the assistant wrote; in a prompt it is plain text."""

        tags = {"generation"}  # noqa: RUF012 (jinja2 wants an attribute of this type)

        def parse(self, parser: Parser) -> Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

        def _render(self, caller: Any) -> str:
            return str(caller())

    class Sandbox(ImmutableSandboxedEnvironment):
        def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
            """Refuses at once: an undefined value would be taken for false."""
            raise SecurityError(f"attribute {attribute!r} of {type(obj).__name__!r} is unsafe")

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def strftime_now(form: str) -> str:
        return datetime.now().strftime(form)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    sandbox = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols])
    sandbox.filters["tojson"] = tojson
    sandbox.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    return sandbox


def read(stream: BinaryIO) -> str | None:
    """A request, or None at the end."""
    head = stream.read(8)
    return stream.read(struct.unpack(">Q", head)[0]).decode("utf-8") if len(head) == 8 else None


def write(stream: BinaryIO, kind: bytes, text: bytes) -> None:
    stream.write(kind + struct.pack(">Q", len(text)) + text)
    stream.flush()


def answer(sandbox: Any, template: Any, request: str) -> tuple[bytes, bytes, Any]:
    """The kind and the text of a reply, and the template, which the first request brings."""
    try:
        if template is None:
            return b"T", b"", sandbox.from_string(request)
        text = template.render(json.loads(request)).encode("utf-8")
    except MemoryError:
        raise
    except Exception as error:  # whatever an operation on values that do not fit raises
        return b"E", (str(error) or type(error).__name__)[:1000].encode("utf-8", "replace"), template
    if len(text) > MAX_TEXT:
        return b"E", b"its text is longer than %d bytes" % MAX_TEXT, template
    return b"T", text, template


def main() -> None:
    sys.path.extend(sys.argv[1:])
    requests, replies = sys.stdin.buffer, sys.stdout.buffer
    sandbox, template = environment(), None
    limit_memory()
    try:
        while (request := read(requests)) is not None:
            limit_time(CPU_SECONDS)
            kind, text, template = answer(sandbox, template, request)
            limit_time(0)
            write(replies, kind, text)
    except MemoryError:
        write(replies, b"M", b"")


if __name__ == "__main__":
    main()
