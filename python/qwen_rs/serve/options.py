"""The options of ``qwen-rs serve``. Nothing here needs the extra."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

from .._core import default_threads
from ..checkpoint.source import DEMO
from ..engine.arguments import whole
from ..engine.options import DTYPES, KV_DTYPES, MAX_BATCH

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Declares the options."""
    p.description = (
        "Serves OpenAI's API: many requests at once, each with the answer that it gets alone. "
        "SIGTERM and Ctrl-C let those that run end."
    )
    p.add_argument("--model", metavar="DIR|HUB_ID", help="a checkpoint or hub id (default: the bundled demo)")
    p.add_argument("--dtype", default=DTYPES[0], choices=DTYPES, help="weights (%(default)s)")
    p.add_argument(
        "--kv-dtype", default=KV_DTYPES[0], choices=KV_DTYPES, help="what the cache stores (%(default)s)"
    )
    p.add_argument("--threads", type=int, metavar="N", help="default: all that this process may use")
    p.add_argument("--max-context", type=int, metavar="N", help="tokens of a prompt and its answer together")
    p.add_argument("--host", default="127.0.0.1", help="the address to listen on (%(default)s)")
    p.add_argument("--port", type=int, default=8000, help="the port; 0: any that is free (%(default)s)")
    p.add_argument("--api-key", metavar="KEY", help="what clients must send; all routes but /health need it")
    p.add_argument(
        "--max-num-seqs",
        type=int,
        default=MAX_BATCH,
        metavar="N",
        help="sequences that run together (%(default)s)",
    )
    p.add_argument("--kv-memory", metavar="SIZE", help="memory for keys and values, such as 4G")
    p.add_argument(
        "--max-queued-requests",
        type=int,
        default=128,
        metavar="N",
        help="sequences that may wait; more get status 429 (%(default)s)",
    )
    p.add_argument(
        "--request-timeout", type=float, metavar="SECONDS", help="longest time for a request (default: none)"
    )
    p.add_argument(
        "--shutdown-timeout",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="how long requests may still run after SIGTERM (%(default)s)",
    )
    p.add_argument(
        "--cors", action="append", default=[], metavar="ORIGIN", help="web pages that may ask; * is any"
    )
    p.add_argument("--tls-cert", metavar="FILE", help="certificate chain, PEM")
    p.add_argument("--tls-key", metavar="FILE", help="its private key, PEM")


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a server is told, checked."""

    model: str = "demo"
    dtype: str = DTYPES[0]
    kv_dtype: str = KV_DTYPES[0]
    threads: int | None = None
    max_context: int | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    max_num_seqs: int = MAX_BATCH
    kv_memory: int | None = None
    max_queued_requests: int = 128
    request_timeout: float | None = None
    shutdown_timeout: float = 30.0
    cors: tuple[str, ...] = ()
    tls_cert: str | None = None
    tls_key: str | None = None

    @property
    def name(self) -> str:
        """The model's, as clients call it: a hub id, or the name of a directory."""
        hub = self.model.count("/") == 1 and not Path(self.model).exists()
        return self.model if hub else Path(self.model).resolve().name

    @classmethod
    def of(cls, args: argparse.Namespace) -> Options:
        """
        Raises:
            ValueError: an option is out of its range.
        """
        if args.threads is not None and args.threads > default_threads():
            raise ValueError(f"--threads: {args.threads} threads on {default_threads()} cores")
        if (args.tls_cert is None) != (args.tls_key is None):
            raise ValueError("--tls-cert and --tls-key go together")
        for name in ("tls_cert", "tls_key"):
            if (path := getattr(args, name)) is not None:
                Path(path).open("rb").close()
        if args.api_key is not None and not (args.api_key.isascii() and args.api_key.isprintable()):
            raise ValueError("--api-key must be printable ASCII")
        if args.api_key == "":
            raise ValueError("--api-key is empty")
        for name in ("request_timeout", "shutdown_timeout"):
            seconds = getattr(args, name)
            if seconds is not None and not 0 <= seconds < 1e9:
                raise ValueError(f"--{name.replace('_', '-')} must be 0 or more seconds, not {seconds}")
        if args.request_timeout == 0:
            raise ValueError("--request-timeout must be above 0")
        if not 0 <= args.port < 1 << 16:
            raise ValueError(f"--port must be 0 to 65535, not {args.port}")
        return cls(
            model=DEMO if args.model is None else args.model,
            dtype=args.dtype,
            kv_dtype=args.kv_dtype,
            threads=args.threads,
            max_context=args.max_context,
            host=args.host,
            port=args.port,
            api_key=args.api_key,
            max_num_seqs=whole("--max-num-seqs", args.max_num_seqs, 1),
            kv_memory=None if args.kv_memory is None else size("--kv-memory", args.kv_memory),
            max_queued_requests=whole("--max-queued-requests", args.max_queued_requests, 0),
            request_timeout=args.request_timeout,
            shutdown_timeout=args.shutdown_timeout,
            cors=tuple(args.cors),
            tls_cert=args.tls_cert,
            tls_key=args.tls_key,
        )


def size(name: str, text: str) -> int:
    """Bytes of a size such as ``512M``.

    >>> size("--kv-memory", "4G"), size("--kv-memory", "1.5KiB")
    (4294967296, 1536)
    """
    if (found := re.fullmatch(r"(\d+(?:\.\d+)?) *([KMGT]?)(?:iB|B)?", text.strip(), re.IGNORECASE)) is None:
        raise ValueError(f"{name} must be a size such as 4G or 512M, not {text!r}")
    return int(float(found[1]) * UNITS[found[2].upper()])
