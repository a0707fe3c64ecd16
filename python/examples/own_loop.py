"""A generation loop of one's own over Model, Cache and Sampler: here, the best of three continuations.

    python python/examples/own_loop.py [CHECKPOINT_DIRECTORY]

The prompt is run once; the paged cache is forked for each continuation, and its blocks are shared until
they are written.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

import qwen_rs
from qwen_rs import Model, Sampler, Tokenizer

directory = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(qwen_rs.__file__).parent / "demo"
model, tokenizer = Model.load(directory), Tokenizer(directory)
pool = model.new_pool(16, block_rows=32)

prompt = tokenizer.encode("She was the youngest of the two daughters of")
begun = pool.new_cache()
first = model.prefill(begun, prompt)[0]  # [vocab_size]

continuations: list[tuple[float, str]] = []
for seed in range(3):
    cache, sampler, logits = begun.fork(), Sampler(temperature=0.8, top_k=40, seed=seed), first
    tokens: list[int] = []
    score = 0.0
    for _ in range(12):
        token = sampler.sample(logits)
        tokens.append(token)
        wide = logits.astype(np.float64)
        score += float(wide[token] - np.logaddexp.reduce(wide))  # the token's log probability, nats
        logits = model.decode(cache, token)
    continuations.append((score, tokenizer.decode(tokens)))

for score, text in sorted(continuations, reverse=True):
    print(f"{score:7.2f} {text!r}")
