"""The command line: ``qwen-rs generate`` and ``qwen-rs bench``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import NoReturn

from tqdm import tqdm

from . import __version__, bench
from ._core import CacheError, ModelError, default_threads
from .checkpoint.reasoning import TAGS, Part, ReasoningSplitter
from .checkpoint.source import DEMO
from .engine.llm import LLM
from .engine.metrics import trace_table
from .engine.sampling_params import DEFAULT_MAX_TOKENS, SamplingParams

DEMO_PROMPT = "It is a truth universally acknowledged, that"
INTERRUPTED = 130  # 128 + SIGINT, as shells report it


class _Parser(argparse.ArgumentParser):
    """One line for a usage error."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="qwen-rs", description="Qwen3 language models on the CPU.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"qwen-rs {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_generate(commands.add_parser("generate", help="write text", allow_abbrev=False))
    bench.add_arguments(commands.add_parser("bench", help="measure speed", allow_abbrev=False))
    return parser


def _add_generate(p: argparse.ArgumentParser) -> None:
    p.description = "Writes text. It streams to standard output; everything else goes to standard error."
    p.add_argument(
        "--model", metavar="DIR|HUB_ID", help="a checkpoint directory or hub id (default: the bundled demo)"
    )
    p.add_argument("--prompt", metavar="TEXT|-", help="the prompt; - reads standard input")
    p.add_argument(
        "--max-tokens",
        type=int,
        default=DEFAULT_MAX_TOKENS,
        metavar="N",
        help="tokens to generate at most (%(default)s)",
    )
    sampling = p.add_argument_group("sampling (defaults: the checkpoint's generation_config.json)")
    sampling.add_argument("--temperature", type=float, metavar="T", help="0 is greedy")
    sampling.add_argument("--top-k", type=int, metavar="K", help="the k likeliest tokens; 0: all")
    sampling.add_argument("--top-p", type=float, metavar="P", help="the likeliest tokens that reach p")
    sampling.add_argument("--min-p", type=float, metavar="P", help="tokens at least p x the likeliest")
    sampling.add_argument("--repeat-penalty", type=float, metavar="R", help="1: none")
    sampling.add_argument("--seed", type=int, metavar="S", help="the same seed gives the same text")
    sampling.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be repeated"
    )
    chat = p.add_argument_group("prompting (default: the chat template, if the checkpoint has one)")
    mode = chat.add_mutually_exclusive_group()
    mode.add_argument("--chat", action="store_true", help="through the chat template")
    mode.add_argument("--raw", action="store_true", help="the prompt as it is")
    think = chat.add_mutually_exclusive_group()
    think.add_argument("--think", dest="think", action="store_true", default=None, help="let the model think")
    think.add_argument("--no-think", dest="think", action="store_false", help="answer without thinking")
    chat.add_argument(
        "--no-thinking-output", action="store_true", help="write the answer alone, not the thinking before it"
    )
    engine = p.add_argument_group("engine")
    engine.add_argument(
        "--dtype", default="q8_0", choices=["q8_0", "bf16", "f32"], help="weights (%(default)s)"
    )
    engine.add_argument(
        "--kv", default="basic", choices=["basic", "paged", "concat"], help="KV cache (%(default)s)"
    )
    engine.add_argument(
        "--kv-dtype", default="f32", choices=["f32", "f16"], help="what the cache stores (%(default)s)"
    )
    engine.add_argument("--backend", default="simd", choices=["simd", "scalar"], help="kernels (%(default)s)")
    engine.add_argument("--threads", type=int, metavar="N", help="default: all that this process may use")
    engine.add_argument("--trace-ops", action="store_true", help="print calls and milliseconds per operation")
    engine.add_argument("--metrics", default="text", choices=["text", "json", "none"], help="(%(default)s)")


def main(argv: list[str] | None = None) -> int:
    """Runs a command; returns its exit status: 0, 2 for usage, 1 for the rest."""
    args = _parser().parse_args(argv)
    program = f"qwen-rs {args.command}"
    try:
        return bench.run(args) if args.command == "bench" else _generate(args)
    except BrokenPipeError:
        # Nothing more can be written; Python must not try again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _fail(program, "standard output was closed", 1)
    except KeyboardInterrupt:
        return _fail(program, "interrupted", INTERRUPTED)
    except ValueError as error:
        return _fail(program, error, 2)
    except OSError as error:
        return _fail(program, _os_error(error), 1)
    except (ModelError, CacheError) as error:
        return _fail(program, error, 1)
    except MemoryError as error:
        return _fail(program, str(error) or "out of memory", 1)


def _fail(program: str, message: object, status: int) -> int:
    line = " ".join(str(message).split())
    print(f"{program}: {line}", file=sys.stderr)
    return status


def _os_error(error: OSError) -> str:
    return f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)


def _generate(args: argparse.Namespace) -> int:
    params = SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repetition_penalty=args.repeat_penalty,
        seed=args.seed,
        stop=args.stop,
    )
    prompt = _prompt(args)
    cores = default_threads()
    if args.threads is not None and args.threads > cores:
        print(
            f"warning: {args.threads} threads on {cores} cores; more than {cores} are slower", file=sys.stderr
        )
    with _load(args) as llm:
        ids: str | list[int] = prompt
        opened = prompt.rstrip().endswith(TAGS[0])
        chat = llm.chat_template is not None and not args.raw
        if chat:
            message = {"role": "user", "content": prompt}
            chat_prompt = llm.chat_prompt([message], enable_thinking=args.think)
            ids, opened = chat_prompt.token_ids, chat_prompt.thinking
        elif args.chat or args.think is not None:
            option = "--chat" if args.chat else "--think" if args.think else "--no-think"
            why = "--raw was given" if args.raw else "the checkpoint has no chat template"
            raise ValueError(f"{option} cannot be used: {why}")
        state = llm.start(ids, params)
        display = _Display(opened, thinking=not args.no_thinking_output, chat=chat)
        llm.model.trace_ops(args.trace_ops)
        for piece in llm.pieces(state):
            sys.stdout.write(display.push(piece.text))
            sys.stdout.flush()
        sys.stdout.write(display.flush())
        if sys.stdout.isatty():  # a pipe carries the text alone
            sys.stdout.write("\n")
            sys.stdout.flush()
        metrics = llm.output(state).metrics
        if args.trace_ops:
            print(trace_table(llm.model.op_stats()), file=sys.stderr)
        if args.metrics == "text":
            print(f"\n{metrics.text()}", end="", file=sys.stderr)
        elif args.metrics == "json":
            print(json.dumps(metrics.as_dict()), file=sys.stderr)
    return 0


class _Display:
    """What is written of the text: on a terminal thinking is dim, and apart from the answer; a pipe carries
    the text as it was generated. Without ``thinking`` both show the answer alone."""

    def __init__(self, opened: bool, *, thinking: bool, chat: bool) -> None:
        terminal = sys.stdout.isatty()
        apart = not thinking or (chat and terminal)
        self._splitter = ReasoningSplitter(opened=opened) if apart else None
        self._thinking = thinking
        self._dim = ("\x1b[2m", "\x1b[0m") if terminal and not os.environ.get("NO_COLOR") else ("", "")
        self._last: str | None = None

    def push(self, text: str) -> str:
        return self._show(self._splitter.push(text)) if self._splitter is not None else text

    def flush(self) -> str:
        return self._show(self._splitter.flush()) if self._splitter is not None else ""

    def _show(self, parts: list[Part]) -> str:
        out = ""
        for kind, text in parts:
            if kind == "reasoning" and not self._thinking:
                continue
            if self._last not in (None, kind):
                out, text = f"{out}\n\n", text.lstrip("\n")
            self._last = kind
            before, after = self._dim if kind == "reasoning" else ("", "")
            out += f"{before}{text}{after}"
        return out


def _prompt(args: argparse.Namespace) -> str:
    if args.prompt == "-":
        try:
            prompt = sys.stdin.read()
        except UnicodeDecodeError as error:
            raise ValueError(f"standard input is not text: {error}") from None
    elif args.prompt is None and args.model is None:
        prompt = DEMO_PROMPT
    elif args.prompt is None:
        raise ValueError("--prompt TEXT is needed (--prompt - reads standard input)")
    else:
        prompt = str(args.prompt)
    if not prompt:
        raise ValueError("the prompt is empty")
    if args.model is None:
        shown = f" Prompt: {prompt}" if args.prompt is None else ""
        print(
            f"No --model given: running the bundled demo, a small Qwen3 trained on Jane Austen.{shown}",
            file=sys.stderr,
        )
    return prompt


def _load(args: argparse.Namespace) -> LLM:
    with tqdm(
        total=100, desc="loading", unit="%", delay=0.5, leave=False, disable=None, file=sys.stderr
    ) as bar:
        return LLM(
            DEMO if args.model is None else args.model,
            dtype=args.dtype,
            kv=args.kv,
            kv_dtype=args.kv_dtype,
            backend=args.backend,
            threads=args.threads,
            progress=lambda share: bar.update(round(100 * share) - bar.n),
        )


if __name__ == "__main__":
    sys.exit(main())
