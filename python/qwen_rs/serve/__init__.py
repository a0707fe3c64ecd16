"""``qwen-rs serve``: an OpenAI-compatible server (the extra ``qwen-rs[serve]``)."""

from __future__ import annotations

import argparse
import importlib.util

from .options import Options, add_arguments

__all__ = ["Options", "add_arguments", "run"]

NEEDED = ("llguidance", "msgspec", "prometheus_client", "starlette", "uvicorn")
"""What the extra installs."""


def run(args: argparse.Namespace) -> int:
    """Runs the server; returns its exit status.

    Raises:
        OSError: the extra is not installed, the address cannot be listened on, or a file cannot be read.
        ValueError: an option is out of its range.
    """
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise OSError(f"{', '.join(missing)} not installed: pip install 'qwen-rs[serve]'")
    from .server import serve  # only now is it known to be importable

    serve(Options.of(args))
    return 0
