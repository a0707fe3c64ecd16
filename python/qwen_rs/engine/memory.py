"""How much memory there is for keys and values."""

from __future__ import annotations

from pathlib import Path

from .._core import CacheError

SHARE = 0.5
"""Of the memory that is free, what a pool takes at most unless it is told."""


def free_memory() -> int | None:
    """Bytes that this process may still take: what the system has, or what is left of the control group's
    limit; None where neither says."""
    left: list[int] = []
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                left.append(int(line.split()[1]) * 1024)
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        if limit.isdecimal():
            left.append(int(limit) - int((group / "memory.current").read_text()))
    except (OSError, ValueError):
        pass
    return min(left, default=None)


def pool_blocks(block_bytes: int, memory: int | None, most: int) -> int:
    """How many blocks a pool has, at most ``most``.

    Args:
        block_bytes: bytes of a block.
        memory: bytes for all; None: a share of what is free.

    Raises:
        CacheError: there is no room for two blocks.
    """
    if memory is None:
        free = free_memory()
        blocks = most if free is None else min(most, int(free * SHARE) // block_bytes)
    else:
        blocks = min(most, memory // block_bytes)
    if blocks < 2:
        raise CacheError(f"the KV cache needs room for 2 blocks of {block_bytes} bytes at least")
    return blocks
