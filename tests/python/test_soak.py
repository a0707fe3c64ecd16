"""Many generations in one process: memory stays, and so do the bits.

The program runs in a process of its own, so that nothing else's memory is counted. Two thousand
generations are part of every run; ``-m slow`` soaks for longer.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
from conftest import report

PROGRAM = """
import gc, resource, sys
from qwen_rs import LLM, SamplingParams

def resident():
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

count = int(sys.argv[1])
llms = {kv: LLM("demo", kv=kv, kv_dtype=dtype) for kv, dtype in (("basic", "f32"), ("paged", "f16"))}
prompts = ["Emma", "It is a truth universally acknowledged", [7] * 40, "“你好” — \U0001f600"]
jobs = [(kv, i) for kv in llms for i in range(len(prompts))]
first, changed, warm = {}, 0, 0
done = 0
while done < count:
    for kv, i in jobs:
        params = SamplingParams(max_tokens=6 + i, temperature=0.9, seed=i)
        llm = llms[kv]
        kind = done % 5
        if kind == 0:
            ids = [t for piece in llm.stream(prompts[i], params) for t in piece.token_ids]
        elif kind == 1:
            ids = llm.generate([prompts[i], prompts[i - 1]], params)[0].token_ids
        elif kind == 2:  # a stream that is dropped half-way
            next(llm.stream(prompts[i], params))
            ids = first.get((kv, i))
        else:
            ids = llm.generate(prompts[i], params).token_ids
        changed += first.setdefault((kv, i), ids) not in (ids, None)
        done += 1
    if warm == 0 and done >= count // 4:
        warm = resident()
growth = resident() - warm
print(done, changed, growth)
"""


def soak(generations: int) -> None:
    command = [sys.executable, "-c", PROGRAM, str(generations)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    done, changed, growth = map(int, result.stdout.split())
    report(f"{done} generations soaked: {changed} with other tokens, {growth / 1e6:+.1f} MB resident")
    assert done >= generations and changed == 0
    assert growth < 4 << 20


def test_two_thousand_generations_leave_memory_as_it_was() -> None:
    soak(2000)


@pytest.mark.slow
def test_fifty_thousand_generations_leave_memory_as_it_was() -> None:
    soak(50_000)
