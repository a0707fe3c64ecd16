"""What a generation took. Every number is measured."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """Figures of one generation.

    A generation of n tokens makes n forward passes; the first is the prefill.

    Attributes:
        forward_ms: milliseconds of every forward pass, in order.
        prompt_tokens: tokens of the prompt.
        cached_tokens: of these, tokens whose keys and values were there already (a shared prefix).
        generated_tokens: tokens generated, an end-of-sequence token included.
        load_ms: milliseconds from checkpoint to ready model.
        weight_bytes: bytes of the packed weights.
        kv_bytes: bytes claimed by the KV cache at the end.
        seed: the seed that was used.
    """

    backend: str
    isa: str
    threads: int
    dtype: str
    kv_cache: str
    kv_dtype: str
    forward_ms: tuple[float, ...]
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    finish_reason: str
    load_ms: float
    weight_bytes: int
    kv_bytes: int
    seed: int

    @property
    def time_to_first_token_ms(self) -> float:
        """The first forward pass."""
        return self.forward_ms[0]

    @property
    def decode_tokens_per_second(self) -> float | None:
        """(n - 1) / the seconds of all passes but the first; None if there was only one."""
        rest = sum(self.forward_ms[1:])
        return 1000 * (len(self.forward_ms) - 1) / rest if rest else None

    @property
    def prefill_tokens_per_second(self) -> float:
        """The prompt's tokens that were not cached / the seconds of the first pass."""
        return 1000 * (self.prompt_tokens - self.cached_tokens) / self.forward_ms[0]

    def text(self) -> str:
        """The metrics block."""
        forward, decode = self.forward_ms, self.decode_tokens_per_second
        return (
            f"backend: {self.backend}\n"
            f"kv cache: {self.kv_cache}\n"
            "\n"
            "metrics:\n"
            f"  time_to_first_token_ms: {self.time_to_first_token_ms:.3f}\n"
            f"  decode_tokens_per_second: {'n/a' if decode is None else f'{decode:.3f}'}\n"
            f"  per_forward_ms: min {min(forward):.3f}  max {max(forward):.3f}  "
            f"mean {sum(forward) / len(forward):.3f}  (n={len(forward)})\n"
        )

    def as_dict(self) -> dict[str, Any]:
        """All figures, for JSON."""
        forward = self.forward_ms
        return {
            "backend": self.backend,
            "kv_cache": self.kv_cache,
            "time_to_first_token_ms": self.time_to_first_token_ms,
            "decode_tokens_per_second": self.decode_tokens_per_second,
            "per_forward_ms": {
                "min": min(forward),
                "max": max(forward),
                "mean": sum(forward) / len(forward),
                "n": len(forward),
            },
            "forward_ms": list(forward),
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "generated_tokens": self.generated_tokens,
            "prefill_tokens_per_second": self.prefill_tokens_per_second,
            "finish_reason": self.finish_reason,
            "load_ms": self.load_ms,
            "weight_bytes": self.weight_bytes,
            "kv_bytes": self.kv_bytes,
            "peak_rss_bytes": peak_rss_bytes(),
            "isa": self.isa,
            "threads": self.threads,
            "dtype": self.dtype,
            "kv_dtype": self.kv_dtype,
            "seed": self.seed,
        }


def peak_rss_bytes() -> int | None:
    """The most memory that this process has had resident; None where the system does not say."""
    status = Path("/proc/self/status")
    if status.exists():  # unlike getrusage, not inherited from the process that started this one
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def trace_table(stats: Sequence[tuple[str, str, int, float]]) -> str:
    """Calls and milliseconds per operation, split into prefill and decode."""
    rows: dict[str, dict[str, tuple[int, float]]] = {}
    for phase, op, calls, milliseconds in stats:
        rows.setdefault(op, {})[phase] = (calls, milliseconds)
    lines = ["ops:", f"  {'op':<14}{'prefill calls':>14}{'ms':>12}{'decode calls':>14}{'ms':>12}"]
    for op, phases in rows.items():
        (pc, pm), (dc, dm) = phases["prefill"], phases["decode"]
        lines.append(f"  {op:<14}{pc:>14}{pm:>12.3f}{dc:>14}{dm:>12.3f}")
    return "\n".join(lines) + "\n"
