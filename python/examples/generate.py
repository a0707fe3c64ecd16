"""One prompt, one answer, and what it took.

python python/examples/generate.py [MODEL] [PROMPT]
"""

from __future__ import annotations

import sys

from qwen_rs import LLM, SamplingParams

model = sys.argv[1] if len(sys.argv) > 1 else "demo"
prompt = sys.argv[2] if len(sys.argv) > 2 else "It is a truth universally acknowledged, that"

with LLM(model) as llm:
    output = llm.generate(prompt, SamplingParams(max_tokens=40, temperature=0.8, seed=1))

print(prompt + output.text)
speed = output.metrics.decode_tokens_per_second or 0.0
print(f"[{len(output.token_ids)} tokens, {output.finish_reason}, {speed:.0f} tokens/s]")
