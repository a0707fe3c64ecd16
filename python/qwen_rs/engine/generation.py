"""The generation loop."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence

from .._core import Cache, Model
from .options import BLOCK_ROWS
from .sequence import SequenceState


def generate(model: Model, sequences: Sequence[SequenceState]) -> Iterator[tuple[SequenceState, str]]:
    """Runs sequences to their ends: prefills one after the other, then decodes them together.

    Yields:
        ``(sequence, text)`` for each token of each: the text that the token sets free.
    """
    for sequence in sequences:
        started = time.perf_counter()
        logits = model.prefill(sequence.cache, sequence.prompt_ids[sequence.cached_tokens :])
        yield sequence, sequence.take(logits[0], 1000 * (time.perf_counter() - started))
    while active := [s for s in sequences if s.finish_reason is None]:
        started = time.perf_counter()
        logits = model.decode_batch([s.cache for s in active], [s.token_ids[-1] for s in active])
        milliseconds = 1000 * (time.perf_counter() - started)
        for sequence, row in zip(active, logits, strict=True):
            yield sequence, sequence.take(row, milliseconds)


def caches(
    model: Model, kv: str, kv_dtype: str, prompts: Sequence[Sequence[int]], max_context: int
) -> tuple[list[Cache], int]:
    """An empty cache for each prompt, or in a paged one their common beginning, stored once.

    Returns:
        ``(caches, tokens that all of them hold already)``.
    """
    if kv != "paged":
        return [model.new_cache(kv, kv_dtype=kv_dtype) for _ in prompts], 0
    # Room for all contexts at their longest, and a block each for copies on write; blocks take
    # memory when they are used.
    blocks = len(prompts) * (-(-max_context // BLOCK_ROWS) + 1)
    pool = model.new_pool(blocks, block_rows=BLOCK_ROWS, kv_dtype=kv_dtype)
    # The last token of a prompt is always run: its logits are needed.
    shared = min(_common(prompts), min(map(len, prompts)) - 1) if len(prompts) > 1 else 0
    if shared == 0:
        return [pool.new_cache() for _ in prompts], 0
    first = pool.new_cache()
    model.prefill(first, prompts[0][:shared])
    return [first.fork() for _ in prompts], shared


def _common(prompts: Sequence[Sequence[int]]) -> int:
    """How many first tokens all prompts have in common."""
    columns = zip(*prompts, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda column: len(set(column)) == 1, columns))
