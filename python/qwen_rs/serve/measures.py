"""What ``/metrics`` tells, in Prometheus' text format: vLLM's names under ``qwen_rs:``."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .._core import Engine

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)
PREFIX = "qwen_rs:"
GAUGES = {
    "running": ("num_requests_running", "sequences in the batch"),
    "waiting": ("num_requests_waiting", "sequences that wait"),
    "blocks": ("kv_cache_blocks", "blocks of the KV cache"),
    "free_blocks": ("kv_cache_free_blocks", "blocks that hold nothing"),
    "cached_blocks": ("kv_cache_cached_blocks", "blocks that no sequence uses and a later one may find"),
}
COUNTERS = {
    "steps": ("engine_steps", "passes"),
    "prompt_tokens": ("prompt_tokens", "tokens of prompts that were computed, not found in the cache"),
    "generated_tokens": ("generation_tokens", "tokens generated"),
    "preemptions": ("num_preemptions", "sequences whose blocks were taken from them"),
    "cached_tokens": ("prefix_cache_hits", "tokens of prompts that were found in the cache"),
    "busy_seconds": ("engine_busy_seconds", "seconds inside passes"),
}


class Measures(Collector):
    """Counts what happens to requests, and reads the engine's own counters when it is asked.

    Args:
        engine: whose counters are told.
        model: the label ``model_name``.
    """

    def __init__(self, engine: Engine, model: str) -> None:
        self._engine, self._model = engine, model
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        self._ended = Counter(
            f"{PREFIX}request_success",
            "sequences that ended",
            ["model_name", "finished_reason"],
            registry=self._registry,
        )
        self._cancelled = self._counter("requests_cancelled", "sequences whose client went away or timed out")
        self._first = self._histogram("time_to_first_token_seconds", "from submission on", SECONDS)
        self._gap = self._histogram("inter_token_latency_seconds", "between tokens of a sequence", SECONDS)
        self._whole = self._histogram("e2e_request_latency_seconds", "from submission to end", SECONDS)
        self._prompt = self._histogram("request_prompt_tokens", "tokens of a prompt", TOKENS)
        self._answer = self._histogram("request_generation_tokens", "tokens of an answer", TOKENS)

    def _counter(self, name: str, what: str) -> Counter:
        return Counter(f"{PREFIX}{name}", what, ["model_name"], registry=self._registry).labels(self._model)

    def _histogram(self, name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
        made = Histogram(f"{PREFIX}{name}", what, ["model_name"], buckets=buckets, registry=self._registry)
        return made.labels(self._model)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def token(self, clock: Clock, tokens: int) -> None:
        """A sequence has so many tokens more."""
        now = time.monotonic()
        if clock.last is None:
            self._first.observe(now - clock.begun)
        else:
            for _ in range(tokens):
                self._gap.observe((now - clock.last) / tokens)
        clock.last = now

    def ended(self, clock: Clock, reason: str, prompt_tokens: int, tokens: int) -> None:
        self._ended.labels(self._model, reason).inc()
        self._whole.observe(time.monotonic() - clock.begun)
        self._prompt.observe(prompt_tokens)
        self._answer.observe(tokens)

    def cancelled(self) -> None:
        self._cancelled.inc()

    def collect(self) -> Iterator[Metric]:
        """The engine's counters, as Prometheus reads them."""
        counters = self._engine.counters()
        for key, (name, what) in GAUGES.items():
            gauge = GaugeMetricFamily(f"{PREFIX}{name}", what, labels=["model_name"])
            gauge.add_metric([self._model], counters[key])
            yield gauge
        usage = GaugeMetricFamily(
            f"{PREFIX}kv_cache_usage_perc", "share of the blocks that sequences use", labels=["model_name"]
        )
        used = counters["blocks"] - counters["free_blocks"] - counters["cached_blocks"]
        usage.add_metric([self._model], used / counters["blocks"])
        yield usage
        for key, (name, what) in COUNTERS.items():
            counter = CounterMetricFamily(f"{PREFIX}{name}", what, labels=["model_name"])
            counter.add_metric([self._model], counters[key])
            yield counter


class Clock:
    """When a sequence was submitted, and when its last token came (seconds, monotonic)."""

    def __init__(self) -> None:
        self.begun = time.monotonic()
        self.last: float | None = None
