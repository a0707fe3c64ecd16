"""Peers side by side: the same random weights in qwen-rs and in each installed peer, taking turns.

    pip install llama-cpp-python gguf            # CMAKE_ARGS=-DGGML_NATIVE=ON
    python python/benchmarks/compare_peers.py [--quick] [--json FILE]

Q8_0 weights, F16 cache, the same threads everywhere. Every engine runs in a process of its own and
measures when it is told to, one engine at a time, round after round; the medians are compared. An
engine in another virtual environment is named with ``--python PEER=PATH_TO_PYTHON``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import peer_engines
from tqdm import tqdm

FIGURES = ["prefill 512", "prefill 4096", "decode @0", "decode @512", "decode @4096", "batch 8"]
OURS = "qwen-rs"


class Engine:
    """A worker process that measures one figure at a time."""

    def __init__(self, name: str, python: str, checkpoint: Path, gguf: Path, threads: int) -> None:
        script = str(Path(__file__).with_name("peer_engines.py"))
        arguments = [python, script, name, str(checkpoint), str(gguf), str(threads)]
        self.name = name
        self._process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.ready = self._read() == "ready"

    def measure(self, figure: str) -> float | None:
        """Tokens per second, or None if the engine cannot do it."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(figure + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return None
        answer = json.loads(self._read() or "null")
        return None if answer is None else float(answer)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _read(self) -> str:
        """The next line of ours; engines may print lines of their own."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(peer_engines.MARK):
                return line[len(peer_engines.MARK) :].strip()
        return ""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one round of the short figures")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="(%(default)s)")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="(%(default)s)")
    parser.add_argument("--shape", default="0.6b", help="(%(default)s)")
    parser.add_argument("--figures", default=",".join(FIGURES), help="some of: %(default)s")
    parser.add_argument("--python", action="append", default=[], metavar="PEER=PATH", help="a peer's Python")
    parser.add_argument("--work", type=Path, metavar="DIR", help="where the weights are kept between runs")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    rounds = 2 if args.quick else args.rounds
    figures = [f for f in args.figures.split(",") if not (args.quick and f.endswith("4096"))]
    pythons = dict(entry.split("=", 1) for entry in args.python)
    peers: list[str] = []
    missing: list[str] = []
    for peer, module in peer_engines.MODULES.items():
        found = peer in pythons or peer_engines.installed(module)
        (peers if found else missing).append(peer)
    if missing:
        print(f"not installed, left out: {', '.join(missing)}")
    with tempfile.TemporaryDirectory() as temporary:
        work = args.work or Path(temporary)
        checkpoint, gguf = peer_engines.write_weights(work, args.shape)
        engines = []
        for name in [OURS, *peers]:
            engine = Engine(name, pythons.get(name, sys.executable), checkpoint, gguf, args.threads)
            if engine.ready:
                engines.append(engine)
            else:
                print(f"did not start, left out: {name}")
        results = compare(engines, figures, rounds, args.threads)
        for engine in engines:
            engine.close()
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


def compare(engines: list[Engine], figures: list[str], rounds: int, threads: int) -> list[dict[str, object]]:
    """Rounds of all engines for each figure; prints and returns the ratios of the medians."""
    results: list[dict[str, object]] = []
    print(f"{'figure':<14}{'peer':<14}{'ours':>10}{'theirs':>10}{'ratio':>8}   tokens/s, medians of {rounds}")
    with tqdm(total=len(figures) * rounds * len(engines), leave=False, disable=None) as bar:
        for figure in figures:
            speeds: dict[str, list[float]] = {}
            for _ in range(rounds):
                for engine in engines:
                    bar.set_description(f"{figure}: {engine.name}")
                    speed = engine.measure(figure)
                    if speed is not None:
                        speeds.setdefault(engine.name, []).append(speed)
                    bar.update(1)
            medians = {name: statistics.median(values) for name, values in speeds.items()}
            ours = medians.pop(OURS)
            for peer, theirs in medians.items():
                ratio = ours / theirs
                bar.write(f"{figure:<14}{peer:<14}{ours:>10.1f}{theirs:>10.1f}{ratio:>8.2f}")
                row = {"figure": figure, "peer": peer, "threads": threads}
                results.append({**row, "ours": ours, "theirs": theirs, "ratio": ratio})
            if not medians:
                bar.write(f"{figure:<14}{'-':<14}{ours:>10.1f}")
    return results


if __name__ == "__main__":
    main()
