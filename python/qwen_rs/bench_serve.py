"""``qwen-rs bench --serve URL``: how a server that speaks OpenAI's protocol holds under many clients.

Clients stream ``/v1/completions`` with prompts of random token ids, so no tokenizer is needed and any such
server can be measured. The load is a closed loop, N clients that each ask again once they are answered, or an
open one, arrivals of a Poisson process that wait for nobody. A request is a function of the seed and its
number alone: two runs, also against two servers, send the same.

Tokens are counted by the server's ``usage``, never by frames, of which one may carry any number of tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import math
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from typing import Any

from tqdm import tqdm

from . import bench

LEAVES_AT_ONCE = 0.01
"""Seconds after which a client goes that does not wait for a token."""
MAX_CLIENTS, MAX_REQUESTS, MAX_TOKENS = 10_000, 10_000_000, 1_000_000
DEFAULTS: dict[str, Any] = {
    "requests": 64,
    "prompt_tokens": (128, 128),
    "answer_tokens": (32, 32),
    "shared_prefix": 0.0,
    "cancel": 0.0,
    "seed": 0,
    "vocab": 1000,
    "timeout": 600.0,
}


@dataclass(frozen=True, kw_only=True)
class Load:
    """What is sent.

    Attributes:
        clients: how many requests are open at once; None in an open loop.
        rate: requests a second that arrive, Poisson; None in a closed loop.
        requests: how many in all; None: until ``seconds`` are over, then the open ones are waited for.
        prompt_tokens, answer_tokens: smallest and largest; uniform between them.
        shared_prefix: the share of each prompt, from its first token on, that all prompts have in common.
        cancel: the share of requests whose client goes before the end: at once, or after some frames.
        vocab: token ids are below it.
        stop_at_eos: do not ask for ``ignore_eos``, which OpenAI's own service does not know.
        timeout: seconds that an answer may take.
        ttft_goal, gap_goal: milliseconds to the first token, and from token to token in the mean, within
            which an answer counts as good; None: every complete one does.
    """

    clients: int | None
    rate: float | None
    requests: int | None
    seconds: float | None
    prompt_tokens: tuple[int, int]
    answer_tokens: tuple[int, int]
    shared_prefix: float
    cancel: float
    seed: int
    vocab: int
    stop_at_eos: bool
    timeout: float
    ttft_goal: float | None
    gap_goal: float | None

    def request(self, index: int) -> Planned:
        """The request of a number: the same whenever it is asked for."""
        draw = random.Random(f"{self.seed} {index}")
        length = draw.randint(*self.prompt_tokens)
        common = round(length * self.shared_prefix)
        prefix = random.Random(f"{self.seed} prefix").choices(range(self.vocab), k=common)
        own = draw.choices(range(self.vocab), k=length - common)
        answer = draw.randint(*self.answer_tokens)
        leaves = draw.randrange(answer) if draw.random() < self.cancel else None
        pause = draw.expovariate(self.rate) if self.rate is not None else 0.0
        return Planned(prefix + own, answer, leaves, pause)


@dataclass(frozen=True)
class Planned:
    prompt: list[int]
    answer_tokens: int
    leaves_after: int | None
    """Frames with text after which the client goes; None: it stays."""
    pause: float
    """Seconds between the arrival before and this one, in an open loop."""


@dataclass
class Answer:
    """What came of a request; times are seconds since the run began.

    Attributes:
        outcome: ``complete``, ``cancelled`` by the client, or the kind of error.
        frames: when each frame with text came.
        completion_tokens: by ``usage``; 0 where none came.
    """

    index: int
    started: float
    outcome: str = ""
    ended: float = 0.0
    frames: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    @property
    def ttft(self) -> float:
        """Seconds to the first text, or to the end of an answer without any."""
        return (self.frames[0] if self.frames else self.ended) - self.started

    @property
    def gaps(self) -> list[float]:
        """Seconds from frame to frame."""
        return [after - before for before, after in zip(self.frames, self.frames[1:], strict=False)]

    @property
    def per_token(self) -> float:
        """Seconds from token to token in the mean, after the first."""
        if len(self.frames) < 2:
            return 0.0
        return (self.frames[-1] - self.frames[0]) / max(1, self.completion_tokens - 1)


def percentile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that is at least as large as ``share`` of them (nearest rank); None of none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else None


def _spread(seconds: Sequence[float]) -> dict[str, float | None]:
    milliseconds = [1000 * value for value in seconds]
    return {name: percentile(milliseconds, share) for name, share in (("p50", 0.5), ("p99", 0.99))}


def figures(load: Load, answers: Sequence[Answer], client_cpu: float) -> dict[str, Any]:
    """All figures of a run that had these answers, with the processor seconds that the clients took.

    Rates are per second from the first request sent to the last one ended. Tokens are those of complete
    answers: of one that was left the server tells no usage.
    """
    complete = [a for a in answers if a.outcome == "complete"]
    good = [
        a
        for a in complete
        if (load.ttft_goal is None or 1000 * a.ttft <= load.ttft_goal)
        and (load.gap_goal is None or 1000 * a.per_token <= load.gap_goal)
    ]
    errors = Counter(a.outcome for a in answers if a.outcome not in ("complete", "cancelled"))
    first, last = min((a.started for a in answers), default=0.0), max((a.ended for a in answers), default=0.0)
    seconds = last - first

    def rate(count: float) -> float:
        return count / seconds if seconds > 0 else 0.0

    refused = [a.ended - a.started for a in answers if a.outcome == "HTTP 429"]
    return {
        "seconds": seconds,
        "requests": len(answers),
        "complete": len(complete),
        "cancelled": sum(a.outcome == "cancelled" for a in answers),
        "errors": dict(sorted(errors.items())),
        "ttft_ms": _spread([a.ttft for a in complete]),
        "gap_ms": _spread([gap for a in complete for gap in a.gaps]),
        "per_token_ms": _spread([a.per_token for a in complete if len(a.frames) > 1]),
        "answer_ms": _spread([a.ended - a.started for a in complete]),
        "refusal_ms": _spread(refused),
        "prompt_tokens": sum(a.prompt_tokens for a in complete),
        "cached_tokens": sum(a.cached_tokens for a in complete),
        "completion_tokens": sum(a.completion_tokens for a in complete),
        "tokens_per_second": rate(sum(a.completion_tokens for a in complete)),
        "prompt_tokens_per_second": rate(sum(a.prompt_tokens for a in complete)),
        "requests_per_second": rate(len(complete)),
        "good": len(good),
        "good_requests_per_second": rate(len(good)),
        "good_tokens_per_second": rate(sum(a.completion_tokens for a in good)),
        "client_cpu_seconds": client_cpu,
        "client_cpu_share": rate(client_cpu),
    }


class _Ended(Exception):
    """An answer that ended otherwise than it should; the kind is its text."""


class Clients:
    """Sends a load to a server, from one thread."""

    def __init__(self, url: str, load: Load, model: str, api_key: str | None, bar: Any) -> None:
        self.url, self.load, self.model, self.bar = url, load, model, bar
        self.headers = {"authorization": f"Bearer {api_key}"} if api_key is not None else {}
        self.answers: list[Answer] = []
        self.cpu = 0.0
        self._next = 0
        self._began = 0.0

    async def run(self) -> None:
        httpx = _httpx()
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=self.load.clients)
        # Proxies of the environment would be measured along with the server.
        async with httpx.AsyncClient(
            limits=limits, timeout=None, trust_env=False, headers=self.headers
        ) as client:
            self.model = self.model or await self._first_model(client)
            self._began, cpu = time.perf_counter(), time.process_time()
            if self.load.clients is not None:
                await asyncio.gather(*(self._client(client) for _ in range(self.load.clients)))
            else:
                await self._arrivals(client)
            self.cpu = time.process_time() - cpu

    def _now(self) -> float:
        return time.perf_counter() - self._began

    def _more(self) -> bool:
        over = self.load.seconds is not None and self._now() >= self.load.seconds
        return not over and (self.load.requests is None or self._next < self.load.requests)

    async def _client(self, client: Any) -> None:
        while self._more():
            index, self._next = self._next, self._next + 1
            wait = await self._ask(client, index, self.load.request(index))
            if wait > 0 and self.load.seconds is not None:
                wait = min(wait, max(0.0, self.load.seconds - self._now()))
            if wait > 0:
                await asyncio.sleep(wait)

    async def _arrivals(self, client: Any) -> None:
        due = 0.0
        tasks: set[asyncio.Task[float]] = set()
        while self._more():
            index, self._next = self._next, self._next + 1
            planned = self.load.request(index)
            due += planned.pause
            if self.load.seconds is not None and due >= self.load.seconds:
                break
            await asyncio.sleep(max(0.0, due - self._now()))
            task = asyncio.create_task(self._ask(client, index, planned))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await asyncio.gather(*tasks)

    async def _ask(self, client: Any, index: int, planned: Planned) -> float:
        """Sends a request and takes its answer; returns the seconds that the server wants to be left."""
        httpx = _httpx()
        answer = Answer(index, self._now())
        self.answers.append(answer)
        waits: list[float] = []
        timeout = LEAVES_AT_ONCE if planned.leaves_after == 0 else self.load.timeout
        try:
            answer.outcome = await asyncio.wait_for(self._stream(client, answer, planned, waits), timeout)
        except _Ended as end:
            answer.outcome = str(end)
        except asyncio.TimeoutError:
            answer.outcome = "cancelled" if planned.leaves_after == 0 else "timeout"
        except httpx.ConnectError:
            answer.outcome = "no connection"
            waits.append(1.0)
        except httpx.RequestError:
            answer.outcome = "broken stream"
        answer.ended = self._now()
        self.bar.update(1)
        return sum(waits)

    async def _stream(self, client: Any, answer: Answer, planned: Planned, waits: list[float]) -> str:
        body = {
            "model": self.model,
            "prompt": planned.prompt,
            "max_tokens": planned.answer_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if not self.load.stop_at_eos:
            body["ignore_eos"] = True
        usage = None
        async with client.stream("POST", f"{self.url}/v1/completions", json=body) as response:
            if response.status_code != 200:
                waits.append(_retry_after(response.headers.get("retry-after")))
                raise _Ended(f"HTTP {response.status_code}")
            async for line in response.aiter_lines():
                if not line.startswith("data:"):
                    continue
                data = line[5:].strip()
                if data == "[DONE]":
                    if usage is None:
                        raise _Ended("no usage")
                    answer.prompt_tokens, answer.completion_tokens, answer.cached_tokens = usage
                    return "complete"
                text, told = _frame(data)
                usage = told or usage
                if text:
                    answer.frames.append(self._now())
                    if len(answer.frames) == planned.leaves_after:
                        return "cancelled"
        raise _Ended("broken stream")

    async def _first_model(self, client: Any) -> str:
        httpx = _httpx()
        url = f"{self.url}/v1/models"
        try:
            response = await asyncio.wait_for(client.get(url), self.load.timeout)
        except asyncio.TimeoutError:
            raise OSError(f"{url} does not answer") from None
        except httpx.RequestError as error:
            raise OSError(f"{url}: {str(error) or type(error).__name__}") from None
        if response.status_code in (401, 403):
            raise ValueError(f"{url} answers {response.status_code}: give the server's key by --api-key")
        try:
            return str(response.raise_for_status().json()["data"][0]["id"])
        except (httpx.HTTPStatusError, ValueError, LookupError, TypeError):
            raise ValueError(
                f"{url} answers {response.status_code} and names no model: give its name by --model"
            ) from None


def _frame(data: str) -> tuple[str, tuple[int, int, int] | None]:
    """The text of a frame, and ``(prompt, completion, cached)`` tokens where it tells them."""
    try:
        frame = json.loads(data)
        if frame.get("error"):
            raise _Ended("error in the stream")
        text = "".join(choice.get("text") or "" for choice in frame.get("choices") or ())
        usage = frame.get("usage")
        if not usage:
            return text, None
        details = usage.get("prompt_tokens_details") or {}
        cached = int(details.get("cached_tokens") or 0)
        return text, (int(usage["prompt_tokens"]), int(usage["completion_tokens"]), cached)
    except (ValueError, AttributeError, KeyError, TypeError):
        raise _Ended("broken stream") from None


def _retry_after(value: str | None) -> float:
    try:
        seconds = float(value or 0)
    except ValueError:  # a date: no server of models sends one
        return 0.0
    return seconds if 0 < seconds < math.inf else 0.0


def _httpx() -> Any:
    try:
        import httpx
    except ImportError:
        raise ValueError("--serve needs httpx: pip install 'qwen-rs[bench]'") from None
    return httpx


def _range(text: str) -> tuple[int, int]:
    """``128`` or ``64-256``."""
    low, dash, high = text.partition("-")
    return int(low), int(high if dash else low)


_range.__name__ = "number or range"  # how argparse names it


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Adds what goes with ``--serve`` to the arguments of :mod:`qwen_rs.bench`."""
    local = p.get_default
    alone = ("shape", "prefill", "depth", "batch", "threads", "dtype", "kv", "kv_dtype", "repetitions")
    p.set_defaults(_bench_defaults={name: local(name) for name in alone})
    g = p.add_argument_group("a server under load (with --serve; --model is the name that it knows)")
    g.add_argument("--serve", metavar="URL", help="measure a server, e.g. http://127.0.0.1:8000")
    loop = g.add_mutually_exclusive_group()
    loop.add_argument("--clients", type=int, metavar="N", help="requests open at once (8)")
    loop.add_argument("--rate", type=float, metavar="R", help="Poisson arrivals a second, waiting for nobody")
    length = g.add_mutually_exclusive_group()
    length.add_argument("--requests", type=int, metavar="N", help="requests in all (64)")
    length.add_argument("--seconds", type=float, metavar="S", help="send for so long, then wait for the rest")
    g.add_argument("--prompt-tokens", type=_range, metavar="N|A-B", help="prompt lengths (128)")
    g.add_argument("--answer-tokens", type=_range, metavar="N|A-B", help="answer lengths (32)")
    g.add_argument(
        "--shared-prefix", type=float, metavar="SHARE", help="of each prompt that all have in common (0)"
    )
    g.add_argument("--cancel", type=float, metavar="SHARE", help="of requests whose client goes early (0)")
    g.add_argument("--seed", type=int, metavar="S", help="the same seed sends the same requests (0)")
    g.add_argument("--vocab", type=int, metavar="N", help="token ids of prompts are below it (1000)")
    g.add_argument("--stop-at-eos", action="store_const", const=True, help="do not ask for ignore_eos")
    g.add_argument("--timeout", type=float, metavar="S", help="seconds that an answer may take (600)")
    g.add_argument("--ttft-goal", type=float, metavar="MS", help="goodput: first token within it")
    g.add_argument("--gap-goal", type=float, metavar="MS", help="goodput: tokens within it, in the mean")
    g.add_argument("--api-key", metavar="KEY", help="sent as a bearer token")


ARGUMENTS = (
    *("clients", "rate", "requests", "seconds", "prompt_tokens", "answer_tokens", "shared_prefix", "cancel"),
    *("seed", "vocab", "stop_at_eos", "timeout", "ttft_goal", "gap_goal", "api_key"),
)


def run(args: argparse.Namespace) -> int:
    """Measures a server, prints a table, writes the files; with no ``--serve`` measures the model alone.

    Raises:
        ValueError: an option cannot be used.
        OSError: no server answers.
    """
    if args.serve is None:
        for name in ARGUMENTS:
            if getattr(args, name) is not None:
                raise ValueError(f"{_option(name)} goes with --serve")
        return bench.run(args)
    for name, default in args._bench_defaults.items():
        if getattr(args, name) != default:
            raise ValueError(f"{_option(name)} does not go with --serve: the server has its own")
    load = _load(args)
    url = args.serve.rstrip("/").removesuffix("/v1")
    httpx = _httpx()
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ValueError(f"--serve {args.serve}: {error}") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ValueError(f"--serve {args.serve}: not an address like http://127.0.0.1:8000")
    if args.api_key is not None and not (args.api_key.isascii() and args.api_key.isprintable()):
        raise ValueError("--api-key must be printable ASCII")
    bench.prepare_outputs(args)
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    with tqdm(total=load.requests, desc="requests", unit="", leave=False, disable=None) as bar:
        clients = Clients(url, load, args.model or "", args.api_key, bar)
        asyncio.run(clients.run())
    clients.answers.sort(key=lambda a: a.index)
    result = figures(load, clients.answers, clients.cpu)
    title = {"url": url, "model": clients.model, "date": date}
    print(table(title, load, result), end="")
    if args.json is not None:
        told = {**title, "load": asdict(load), **result, "answers": [asdict(a) for a in clients.answers]}
        bench.write(args.json, (json.dumps(told, indent=1) + "\n").encode())
    if args.plot is not None:
        bench.write(args.plot, plot(title, clients.answers))
    return 0


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _load(args: argparse.Namespace) -> Load:
    def value(name: str) -> Any:
        given = getattr(args, name)
        return DEFAULTS.get(name) if given is None else given

    def check(name: str, allowed: str, fits: bool) -> None:
        if not fits:
            raise ValueError(f"{_option(name)} must be {allowed}, not {getattr(args, name)}")

    for name, most in (("clients", MAX_CLIENTS), ("requests", MAX_REQUESTS), ("vocab", 1 << 31)):
        given = getattr(args, name)
        check(name, f"1 to {most}", given is None or 1 <= given <= most)
    for name in ("rate", "seconds", "timeout", "ttft_goal", "gap_goal"):
        given = getattr(args, name)
        check(name, "above 0 and finite", given is None or 0 < given < math.inf)
    for name in ("shared_prefix", "cancel"):
        check(name, "0 to 1", 0 <= value(name) <= 1)
    for name in ("prompt_tokens", "answer_tokens"):
        low, high = value(name)
        if not 1 <= low <= high <= MAX_TOKENS:
            raise ValueError(f"{_option(name)} must be 1 to {MAX_TOKENS}, the smaller first: {low}-{high}")
    return Load(
        clients=(8 if args.clients is None else args.clients) if args.rate is None else None,
        rate=args.rate,
        requests=value("requests") if args.seconds is None else None,
        seconds=args.seconds,
        prompt_tokens=value("prompt_tokens"),
        answer_tokens=value("answer_tokens"),
        shared_prefix=value("shared_prefix"),
        cancel=value("cancel"),
        seed=value("seed"),
        vocab=value("vocab"),
        stop_at_eos=bool(args.stop_at_eos),
        timeout=value("timeout"),
        ttft_goal=args.ttft_goal,
        gap_goal=args.gap_goal,
    )


def table(title: dict[str, str], load: Load, told: dict[str, Any]) -> str:
    """The figures as lines of text."""

    def span(lengths: tuple[int, int]) -> str:
        return str(lengths[0]) if lengths[0] == lengths[1] else f"{lengths[0]}-{lengths[1]}"

    loop = f"{load.clients} clients" if load.rate is None else f"{load.rate:g} arrivals/s"
    lines = [
        f"{title['url']}: {title['model']}, {title['date']}",
        f"{loop}, prompts of {span(load.prompt_tokens)} tokens ({100 * load.shared_prefix:g}% shared), "
        f"answers of {span(load.answer_tokens)}, {100 * load.cancel:g}% cancelled, seed {load.seed}",
        f"{told['requests']} requests in {told['seconds']:.1f} s: {told['complete']} complete, "
        f"{told['cancelled']} cancelled, {sum(told['errors'].values())} errors",
        *(f"  {kind}: {count}" for kind, count in told["errors"].items()),
        f"{'figure':<28}{'p50':>10}{'p99':>10}",
    ]
    rows = {
        "time to first token, ms": told["ttft_ms"],
        "gap between frames, ms": told["gap_ms"],
        "time per token, ms": told["per_token_ms"],
        "whole answer, ms": told["answer_ms"],
        "refusal (429), ms": told["refusal_ms"],
    }
    for name, spread in rows.items():
        if spread["p50"] is not None:
            lines.append(f"{name:<28}{spread['p50']:>10.1f}{spread['p99']:>10.1f}")
    cached = 100 * told["cached_tokens"] / max(1, told["prompt_tokens"])
    lines += [
        f"tokens/s (by usage): {told['tokens_per_second']:.1f} generated, "
        f"{told['prompt_tokens_per_second']:.1f} of prompts ({cached:.0f}% cached)",
        f"goodput: {told['good']} answers, {told['good_requests_per_second']:.2f} requests/s, "
        f"{told['good_tokens_per_second']:.1f} tokens/s",
        f"clients' processor time: {told['client_cpu_seconds']:.2f} s, "
        f"{100 * told['client_cpu_share']:.0f}% of a core",
    ]
    return "\n".join(lines) + "\n"


def plot(title: dict[str, str], answers: Sequence[Answer]) -> bytes:
    """A PNG: what share of first tokens and of gaps came within a time."""
    pyplot = bench.pyplot()
    sheet, axes = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    sheet.suptitle(", ".join(title.values()).replace("$", r"\$"), fontsize=9)
    complete = [a for a in answers if a.outcome == "complete"]
    series = {
        "time to first token, ms": [a.ttft for a in complete],
        "gap between frames, ms": [gap for a in complete for gap in a.gaps],
    }
    for axis, (label, seconds) in zip(axes, series.items(), strict=True):
        ordered = sorted(1000 * value for value in seconds)
        axis.step(ordered, [(i + 1) / len(ordered) for i in range(len(ordered))], where="post")
        axis.set(xlabel=label, ylabel="share within it", ylim=(0, 1.02))
        axis.grid(alpha=0.3)
    png = io.BytesIO()
    sheet.savefig(png, dpi=120, format="png")
    pyplot.close(sheet)
    return png.getvalue()
