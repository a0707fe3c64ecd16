"""The book chapter's measurement: the zero-copy cache against the one that copies.

    python python/benchmarks/chapter.py MODEL_DIR

Q8_0 weights, F32 caches, 64 tokens after 17 and after 511 prompt tokens; the two caches take turns.
Prints decode tokens per second (medians), the ratio, and the times of all forward passes of one run
of each: flat, and a sawtooth.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

from qwen_rs import Model

TOKENS = 64
BARS = "▁▂▃▄▅▆▇█"


def generate(model: Model, kind: str, prompt: int) -> list[float]:
    """Milliseconds of every forward pass."""
    cache = model.new_cache(kind)
    times = []
    started = time.perf_counter()
    token = int(model.prefill(cache, [(7 * i) % 1000 for i in range(prompt)])[0].argmax())
    times.append(1000 * (time.perf_counter() - started))
    for _ in range(TOKENS - 1):
        started = time.perf_counter()
        token = int(model.decode(cache, token).argmax())
        times.append(1000 * (time.perf_counter() - started))
    return times


def line(times: list[float], low: float, high: float) -> str:
    scale = (len(BARS) - 1) / max(high - low, 1e-9)
    return "".join(BARS[min(len(BARS) - 1, max(0, round((t - low) * scale)))] for t in times)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    model = Model.load(args.model)
    print(f"{model.isa}, {model.threads} threads, {model.dtype}; {TOKENS} tokens, {args.repeats} runs each")
    results = []
    for prompt in (17, 511):
        runs: dict[str, list[list[float]]] = {"concat": [], "basic": []}
        for _ in range(args.repeats + 1):  # the first is a warm-up
            for kind, times in runs.items():
                times.append(generate(model, kind, prompt)[1:])
        speed = {k: [1000 * len(t) / sum(t) for t in times[1:]] for k, times in runs.items()}
        median = {k: statistics.median(s) for k, s in speed.items()}
        ratio = statistics.median(b / c for b, c in zip(speed["basic"], speed["concat"], strict=True))
        basic, concat = median["basic"], median["concat"]
        print(f"prompt {prompt}: basic {basic:.2f}, concat {concat:.2f} tokens/s, ratio {ratio:.3f}")
        typical = {k: sorted(times[1:], key=sum)[len(times) // 2] for k, times in runs.items()}
        everything = sorted(t for times in typical.values() for t in times)
        low, high = everything[0], everything[int(0.98 * (len(everything) - 1))]
        for kind, times in typical.items():
            print(f"  {kind:<6} {line(times, low, high)}  {min(times):.1f} to {max(times):.1f} ms")
        results.append({"prompt": prompt, **median, "ratio": ratio, "per_forward_ms": typical})
    if args.json:
        args.json.write_text(json.dumps(results) + "\n")


if __name__ == "__main__":
    main()
