"""``qwen-rs bench``: how fast, and how close to what the machine can do.

Every figure is the median over repetitions, with its spread, beside the ceiling that bounds it, which
is measured in the same run on the same threads: reading the weights' own memory for decode, int8 (or
f32) multiply-adds in registers for prefill.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ._core import Cache, Model, default_threads
from .checkpoint.source import DEMO, resolve
from .engine.options import BLOCK_ROWS, DTYPES, KV, KV_DTYPES

DECODE_STEPS = 16
"""Decode steps of one repetition."""
MAX_BATCH, MAX_REPETITIONS = 1024, 10_000


def _shape(hidden: int, inner: int, layers: int, heads: int, tied: bool) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "tie_word_embeddings": tied,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    }


SHAPES = {
    "0.6b": _shape(1024, 3072, 28, 16, True),
    "1.7b": _shape(2048, 6144, 28, 16, True),
    "4b": _shape(2560, 9728, 36, 32, True),
}
"""``config.json`` of Qwen3 0.6B, 1.7B and 4B."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One measured figure.

    Attributes:
        name: ``prefill 512``, ``decode @4096``, ``batch 8``.
        model: as ``--model`` or ``--shape`` named it.
        dtype: how its weights are kept.
        isa: the kernels that ran.
        cpu: the processor, as the operating system names it.
        date: when the bench began, ISO 8601 in UTC.
        tokens_per_second: the median; for a batch, of all sequences together.
        low, high: the smallest and largest repetition.
        ceiling: what bounds it, in ``unit`` (``GB/s`` or ``GMAC/s``): measured before each repetition,
            the median, so that another user of the machine slows both.
        achieved: the same measure of this figure.
        share: achieved / ceiling.
        step_bytes: bytes of weights and cache that a decode step reads; None for prefill.
        forward_ms: milliseconds of every forward pass (decode), of the median repetition.
    """

    name: str
    model: str
    dtype: str
    isa: str
    cpu: str
    date: str
    threads: int
    kv: str
    kv_dtype: str
    tokens_per_second: float
    low: float
    high: float
    unit: str
    achieved: float
    ceiling: float
    share: float
    step_bytes: int | None
    forward_ms: list[float]


class Bench:
    """Measures one model on one number of threads."""

    def __init__(self, name: str, model: Model, kv: str, kv_dtype: str, repetitions: int) -> None:
        self.name, self.model = name, model
        self.kv, self.kv_dtype, self.repetitions = kv, kv_dtype, repetitions
        self.cpu = cpu_name()
        self.date = datetime.now(timezone.utc).isoformat(timespec="seconds")
        config = model.config
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        q_width = config["num_attention_heads"] * config["head_dim"]
        kv_width = config["num_key_value_heads"] * config["head_dim"]
        layer = (2 * q_width + 2 * kv_width + 3 * inner) * hidden
        self._layers = int(config["num_hidden_layers"])
        self._matmul_macs = layer * self._layers
        self._head_macs = hidden * config["vocab_size"]
        self._q_width = q_width
        element = {"f32": 4, "f16": 2}[kv_dtype]
        self._token_bytes = 2 * kv_width * self._layers * element
        # An untied embedding is looked up, not read.
        share = (
            1
            if config["tie_word_embeddings"]
            else 1 - self._head_macs / (self._matmul_macs + 2 * self._head_macs)
        )
        self._weight_bytes = int(model.weight_bytes * share)
        self._vocab = int(config["vocab_size"])

    def ceilings(self, tries: int = 3) -> tuple[float, float, float]:
        """Reading (bytes/s), int8 and F32 multiply-adds/s: the best of a few tries, now."""
        bandwidth, int8, f32 = zip(*(self.model.ceilings() for _ in range(tries)), strict=True)
        return max(bandwidth), max(int8), max(f32)

    def cache(self, rows: int) -> Cache:
        if self.kv == "paged":
            pool = self.model.new_pool(rows // BLOCK_ROWS + 2, block_rows=BLOCK_ROWS, kv_dtype=self.kv_dtype)
            return pool.new_cache()
        return self.model.new_cache(self.kv, kv_dtype=self.kv_dtype)

    def prompt(self, length: int) -> list[int]:
        return [(7 * i + 3) % self._vocab for i in range(length)]

    def prefill(self, length: int, advance: Advance) -> Figure:
        """Tokens per second of a prompt of ``length`` tokens."""
        prompt, seconds, ceilings = self.prompt(length), [], []
        for repetition in range(self.repetitions + 1):  # the first is a warm-up
            cache = self.cache(length)
            ceilings.append(self.ceilings()[1 if self.model.activations == "int8" else 2])
            started = time.perf_counter()
            self.model.prefill(cache, prompt)
            if repetition:
                seconds.append(time.perf_counter() - started)
            advance()
        # Matmuls of every token and the last one's logits; attention is f32 and comes on top.
        macs = self._matmul_macs * length + self._head_macs
        achieved = macs / statistics.median(seconds)
        rates = [length / s for s in seconds]
        return self._figure(f"prefill {length}", rates, "GMAC/s", achieved, ceilings[1:], None, [])

    def decode(self, depth: int, advance: Advance) -> Figure:
        """Tokens per second with ``depth`` tokens in the cache."""
        cache = self.cache(depth + 1 + DECODE_STEPS)
        self.model.prefill(cache, self.prompt(max(depth, 1)))
        held = cache.seq_len
        runs, ceilings = [], []
        for repetition in range(self.repetitions + 1):
            cache.truncate(held)
            ceilings.append(self.ceilings()[0])
            times = []
            for token in range(DECODE_STEPS):
                started = time.perf_counter()
                self.model.decode(cache, token)
                times.append(time.perf_counter() - started)
            if repetition:
                runs.append(times)
            advance()
        step_bytes = self._weight_bytes + self._token_bytes * (held + DECODE_STEPS // 2)
        return self._decode_figure(f"decode @{depth}", runs, ceilings[1:], 1, step_bytes)

    def batch(self, size: int, advance: Advance) -> Figure:
        """Tokens per second of ``size`` sequences of 128 tokens decoded together."""
        caches = [self.cache(128 + 1 + DECODE_STEPS) for _ in range(size)]
        for cache in caches:
            self.model.prefill(cache, self.prompt(128))
        runs, ceilings = [], []
        for repetition in range(self.repetitions + 1):
            times = []
            ceilings.append(self.ceilings()[0])
            for cache in caches:
                cache.truncate(128)
            for token in range(DECODE_STEPS):
                started = time.perf_counter()
                self.model.decode_batch(caches, [token + i for i in range(size)])
                times.append(time.perf_counter() - started)
            if repetition:
                runs.append(times)
            advance()
        step_bytes = self._weight_bytes + size * self._token_bytes * (128 + DECODE_STEPS // 2)
        return self._decode_figure(f"batch {size}", runs, ceilings[1:], size, step_bytes)

    def _decode_figure(
        self, name: str, runs: list[list[float]], ceilings: list[float], size: int, step_bytes: int
    ) -> Figure:
        # A repetition's figure is its median step: other users of the machine show in single steps.
        steps = [statistics.median(times) for times in runs]
        achieved = step_bytes / statistics.median(steps)
        typical = sorted(runs, key=statistics.median)[len(runs) // 2]
        rates = [size / s for s in steps]
        forward = [1000 * t for t in typical]
        return self._figure(name, rates, "GB/s", achieved, ceilings, step_bytes, forward)

    def _figure(
        self,
        name: str,
        rates: Sequence[float],
        unit: str,
        achieved: float,
        ceilings: list[float],
        step_bytes: int | None,
        forward_ms: list[float],
    ) -> Figure:
        ceiling = statistics.median(ceilings)
        return Figure(
            name=name,
            model=self.name,
            dtype=self.model.dtype,
            isa=self.model.isa,
            cpu=self.cpu,
            date=self.date,
            threads=self.model.threads,
            kv=self.kv,
            kv_dtype=self.kv_dtype,
            tokens_per_second=statistics.median(rates),
            low=min(rates),
            high=max(rates),
            unit=unit,
            achieved=achieved / 1e9,
            ceiling=ceiling / 1e9,
            share=achieved / ceiling,
            step_bytes=step_bytes,
            forward_ms=forward_ms,
        )


class Advance:
    """Moves the progress bar by one repetition."""

    def __init__(self, bar: Any) -> None:
        self._bar = bar

    def __call__(self) -> None:
        self._bar.update(1)


def numbers(text: str) -> list[int]:
    """``17,511`` as a list; argparse reports what is wrong."""
    values = [int(part) for part in text.split(",") if part]
    if any(value < 0 for value in values):
        raise ValueError
    return values


numbers.__name__ = "list of whole numbers"  # how argparse names it


def cpu_name() -> str:
    """The processor, as the operating system names it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:  # not Linux
        pass
    return platform.processor() or platform.machine()


def add_arguments(p: argparse.ArgumentParser) -> None:
    p.description = "Measures prefill, decode at depth and batched decode, each beside the machine's ceiling."
    source = p.add_mutually_exclusive_group()
    source.add_argument("--model", metavar="DIR|HUB_ID", help="a checkpoint (default: the bundled demo)")
    source.add_argument("--shape", choices=sorted(SHAPES), help="random weights of a released model's shape")
    p.add_argument("-p", "--prefill", type=numbers, default=[17, 511], metavar="N,..", help="prompt lengths")
    p.add_argument("-d", "--depth", type=numbers, default=[0, 512], metavar="N,..", help="decode depths")
    p.add_argument("-b", "--batch", type=numbers, default=[1, 4, 8], metavar="N,..", help="batch sizes")
    p.add_argument("--threads", type=numbers, metavar="N,..", help="default: all that this process may use")
    p.add_argument("--dtype", default=DTYPES[0], choices=DTYPES, help="weights (%(default)s)")
    p.add_argument("--kv", default=KV[0], choices=KV, help="(%(default)s)")
    p.add_argument("--kv-dtype", default="f16", choices=KV_DTYPES, help="(%(default)s)")
    p.add_argument("-r", "--repetitions", type=int, default=5, metavar="N", help="(%(default)s)")
    p.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    p.add_argument("--plot", type=Path, metavar="FILE", help="draw a PNG (needs qwen-rs[plot])")


def run(args: argparse.Namespace) -> int:
    """Measures, prints a table, writes the files.

    Raises:
        ValueError: an option cannot be used.
    """
    if not 1 <= args.repetitions <= MAX_REPETITIONS:
        raise ValueError(f"--repetitions must be 1 to {MAX_REPETITIONS}, not {args.repetitions}")
    if 0 in args.prefill:
        raise ValueError("--prefill: prompt lengths must be at least 1")
    if not all(1 <= size <= MAX_BATCH for size in args.batch):
        raise ValueError(f"--batch: sizes must be 1 to {MAX_BATCH}")
    if args.threads is not None and (not args.threads or 0 in args.threads):
        raise ValueError("--threads must be at least 1")
    prepare_outputs(args)
    figures: list[Figure] = []
    with tqdm(desc="loading", unit=" runs", leave=False, disable=None) as bar:
        for threads in args.threads or [default_threads()]:
            bench = _bench(args, threads)
            bar.total = (args.repetitions + 1) * (len(args.prefill) + len(args.depth) + len(args.batch))
            bar.reset()
            bar.set_description("ceilings")
            bar.write(_header(bench), end="")
            for figure in _figures(bench, args, bar):
                figures.append(figure)
                bar.write(_row(figure), end="")
    if args.json is not None:
        text = json.dumps([asdict(f) for f in figures], indent=1) + "\n"
        write(args.json, text.encode())
    if args.plot is not None:
        write(args.plot, _plot(figures))
    return 0


def prepare_outputs(args: argparse.Namespace) -> None:
    """What is wrong with ``--json`` and ``--plot`` is said before the work, not after it."""
    for option, path in (("--json", args.json), ("--plot", args.plot)):
        if path is None:
            continue
        if "\0" in str(path):
            raise ValueError(f"{option}: a file's name cannot hold NUL")
        if path.is_dir():
            raise IsADirectoryError(f"{option} {path}: is a directory")
        if not path.parent.is_dir():
            raise FileNotFoundError(f"{option} {path}: no such directory")
    if args.plot is not None:
        pyplot()


def write(path: Path, data: bytes) -> None:
    try:
        path.write_bytes(data)
    except OSError as error:  # a full disk is not named by Python
        raise OSError(error.errno, error.strerror, str(path)) from None


def _bench(args: argparse.Namespace, threads: int) -> Bench:
    name = args.model or DEMO
    if args.shape is not None:
        name = f"random {args.shape}"
        model = Model.random(json.dumps(SHAPES[args.shape]), dtype=args.dtype, threads=threads)
    else:
        model = Model.load(resolve(name), dtype=args.dtype, threads=threads)
    context = int(model.config["max_position_embeddings"])
    longest = max([*args.prefill, *(d + DECODE_STEPS for d in args.depth)], default=0)
    if longest > context:
        raise ValueError(f"{longest} tokens are more than the context of {context}")
    return Bench(name, model, args.kv, args.kv_dtype, args.repetitions)


def _figures(bench: Bench, args: argparse.Namespace, bar: Any) -> Iterator[Figure]:
    advance = Advance(bar)
    for length in args.prefill:
        bar.set_description(f"prefill {length}")
        yield bench.prefill(length, advance)
    for depth in args.depth:
        bar.set_description(f"decode @{depth}")
        yield bench.decode(depth, advance)
    for size in args.batch:
        bar.set_description(f"batch {size}")
        yield bench.batch(size, advance)


def _header(bench: Bench) -> str:
    model = bench.model
    bandwidth, int8, f32 = bench.ceilings(20)
    return (
        f"{bench.cpu}, {model.threads} threads of {os.cpu_count()} cores, {bench.date}\n"
        f"{bench.name}: {model.isa} kernels, {model.dtype} weights ({model.weight_bytes / 1e6:.0f} MB), "
        f"{bench.kv} {bench.kv_dtype} cache\n"
        f"ceilings: read {bandwidth / 1e9:.1f} GB/s, int8 {int8 / 1e9:.0f} GMAC/s, "
        f"f32 {f32 / 1e9:.0f} GMAC/s\n"
        f"{'figure':<14}{'tokens/s':>10}{'low':>9}{'high':>9}{'achieved':>17}{'of ceiling':>12}"
        f"{'MB/step':>10}\n"
    )


def _row(f: Figure) -> str:
    step = "" if f.step_bytes is None else f"{f.step_bytes / 1e6:.0f}"
    return (
        f"{f.name:<14}{f.tokens_per_second:>10.1f}{f.low:>9.1f}{f.high:>9.1f}"
        f"{f.achieved:>10.1f} {f.unit:<6}{100 * f.share:>11.0f}%{step:>10}\n"
    )


def _title(f: Figure) -> str:
    # Without math text: a directory's name may hold dollar signs.
    return f"{f.model}: {f.dtype}, {f.isa}, {f.kv} {f.kv_dtype} cache\n{f.cpu}, {f.date}".replace("$", r"\$")


def pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install 'qwen-rs[plot]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def _plot(figures: Sequence[Figure]) -> bytes:
    """A PNG: decode speed against depth, and the times of single forward passes."""
    plt = pyplot()
    sheet, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    sheet.suptitle(_title(figures[0]) if figures else "nothing measured", fontsize=9)
    for threads in sorted({f.threads for f in figures}):
        decode = [f for f in figures if f.threads == threads and f.name.startswith("decode @")]
        depths = [int(f.name.partition("@")[2]) for f in decode]
        left.plot(depths, [f.tokens_per_second for f in decode], marker="o", label=f"{threads} threads")
        limit = [f.ceiling * 1e9 / f.step_bytes for f in decode if f.step_bytes]
        left.plot(depths, limit, linestyle=":", color="gray", label=f"read bandwidth, {threads} threads")
        for f in decode:
            right.plot(f.forward_ms, label=f"{f.name}, {threads} threads")
    left.set(xlabel="tokens in the cache", ylabel="decode, tokens/s", ylim=(0, None))
    right.set(xlabel="decode step", ylabel="forward pass, ms", ylim=(0, None))
    for axes in (left, right):
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize=8)
    png = io.BytesIO()
    sheet.savefig(png, dpi=120, format="png")
    plt.close(sheet)
    return png.getvalue()
