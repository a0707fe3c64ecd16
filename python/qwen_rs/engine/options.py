"""The engine's options: their choices, of which the first is the default, and its sizes."""

from __future__ import annotations

from .._core import weight_dtypes

DTYPES = tuple(weight_dtypes())
"""How weights are kept."""
KV = ("basic", "paged", "concat")
"""KV caches."""
KV_DTYPES = ("f32", "f16")
"""What a KV cache stores."""
BACKENDS = ("simd", "scalar")
"""Kernels."""
BLOCK_ROWS = 64
"""Rows of a block of the paged cache."""
MAX_BATCH = 16
"""Sequences that are decoded together."""
