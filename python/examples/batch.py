"""Several prompts decoded together: each weight is read once a step for all of them.

python python/examples/batch.py [MODEL]
"""

from __future__ import annotations

import sys

from qwen_rs import LLM, SamplingParams

prompts = ["Mr. Darcy", "Emma", "The weather", "Captain Wentworth"]
params = SamplingParams(max_tokens=16, temperature=0)

with LLM(sys.argv[1] if len(sys.argv) > 1 else "demo", kv="paged") as llm:
    outputs = llm.generate(prompts, params)
    for prompt, output in zip(prompts, outputs, strict=True):
        print(f"{prompt}|{output.text}")
    # The promise: a sequence's tokens do not depend on who is decoded with it.
    assert outputs[0].token_ids == llm.generate(prompts[0], params).token_ids
