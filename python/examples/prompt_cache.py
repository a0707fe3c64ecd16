"""A long prompt's keys and values kept in a file: the second run begins where the prompt ends.

python python/examples/prompt_cache.py [FILE]
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import qwen_rs
from qwen_rs import Model, Tokenizer, load_snapshot, save_snapshot

directory = Path(qwen_rs.__file__).parent / "demo"
model, tokenizer = Model.load(directory), Tokenizer(directory)
prompt = tokenizer.encode("It was a truth acknowledged by everybody at Highbury. " * 40)


def last_logits(file: Path) -> bytes:
    """The logits after the prompt, from the file if it is there."""
    cache = model.new_cache()
    started = time.perf_counter()
    if file.exists():
        load_snapshot(file, model, cache)
    else:
        model.prefill(cache, prompt[:-1])
        save_snapshot(file, model, cache)
    logits = model.prefill(cache, prompt[-1:])
    print(f"{1000 * (time.perf_counter() - started):.1f} ms for {cache.seq_len} tokens")
    return logits.tobytes()


with tempfile.TemporaryDirectory() as temporary:
    file = Path(sys.argv[1] if len(sys.argv) > 1 else f"{temporary}/prompt.safetensors")
    computed, restored = last_logits(file), last_logits(file)
assert computed == restored  # the same bits
