"""The command line: ``qwen-rs generate``, ``chat``, ``serve`` and ``bench``."""

from __future__ import annotations

import argparse
import codecs
import contextlib
import io
import json
import os
import re
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from tqdm import tqdm

from . import __version__, bench, bench_serve, serve, terminal_chat
from ._core import CacheError, ModelError, default_threads
from .checkpoint.reasoning import TAGS
from .checkpoint.source import DEMO
from .display import Display
from .engine.llm import LLM
from .engine.metrics import Metrics, trace_table
from .engine.options import BACKENDS, DTYPES, KV, KV_DTYPES
from .engine.sampling_params import DEFAULT_MAX_TOKENS, SamplingParams

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

DEMO_PROMPT = "It is a truth universally acknowledged, that"
INTERRUPTED = 130  # 128 + SIGINT, as shells report it
MAX_PROMPT = 32 << 20
"""Characters of standard input; a context of 131,072 tokens holds half of it at most."""


class _Parser(argparse.ArgumentParser):
    """One line for a usage error."""

    def error(self, message: str) -> NoReturn:
        short = re.sub(r"\S{200,}", lambda word: f"{word[0][:60]}...", message)
        raise SystemExit(_fail(self.prog, f"{short} (see {self.prog} --help)", 2))

    def _print_message(self, message: str, file: SupportsWrite[str] | None = None) -> None:
        # argparse's own passes over an output that cannot be written.
        (file or sys.stderr).write(message)
        if sys.stdout is not None:
            sys.stdout.flush()


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="qwen-rs", description="Qwen3 language models on the CPU.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"qwen-rs {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_generate(commands.add_parser("generate", help="write text", allow_abbrev=False))
    _add_chat(commands.add_parser("chat", help="hold a conversation", allow_abbrev=False))
    serve.add_arguments(commands.add_parser("serve", help="serve OpenAI's API", allow_abbrev=False))
    measure = commands.add_parser("bench", help="measure speed", allow_abbrev=False)
    bench.add_arguments(measure)
    bench_serve.add_arguments(measure)
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
    _add_sampling(p)
    chat = p.add_argument_group("prompting (default: the chat template, if the checkpoint has one)")
    mode = chat.add_mutually_exclusive_group()
    mode.add_argument("--chat", action="store_true", help="through the chat template")
    mode.add_argument("--raw", action="store_true", help="the prompt as it is")
    _add_thinking(chat)
    engine = p.add_argument_group("engine")
    engine.add_argument("--dtype", default=DTYPES[0], choices=DTYPES, help="weights (%(default)s)")
    engine.add_argument("--kv", default=KV[0], choices=KV, help="KV cache (%(default)s)")
    engine.add_argument(
        "--kv-dtype", default=KV_DTYPES[0], choices=KV_DTYPES, help="what the cache stores (%(default)s)"
    )
    engine.add_argument("--backend", default=BACKENDS[0], choices=BACKENDS, help="kernels (%(default)s)")
    engine.add_argument("--threads", type=int, metavar="N", help="default: all that this process may use")
    engine.add_argument("--trace-ops", action="store_true", help="print calls and milliseconds per operation")
    engine.add_argument("--metrics", default="text", choices=["text", "json", "none"], help="(%(default)s)")


def _add_chat(p: argparse.ArgumentParser) -> None:
    p.description = (
        "A conversation, through the model's chat template. In a terminal Ctrl-C stops an answer and Ctrl-D "
        "ends; from a pipe each line is a turn. /help lists what can be said to the program itself."
    )
    p.add_argument("--model", metavar="DIR|HUB_ID", required=True, help="a checkpoint directory or hub id")
    p.add_argument("--system", metavar="TEXT", help="the system message")
    p.add_argument("--max-tokens", type=int, metavar="N", help="tokens of an answer at most (the context)")
    _add_sampling(p)
    _add_thinking(p.add_argument_group("thinking"))
    engine = p.add_argument_group("engine")
    engine.add_argument("--dtype", default=DTYPES[0], choices=DTYPES, help="weights (%(default)s)")
    engine.add_argument(
        "--kv-dtype", default=KV_DTYPES[0], choices=KV_DTYPES, help="what the cache stores (%(default)s)"
    )
    engine.add_argument("--threads", type=int, metavar="N", help="default: all that this process may use")
    p.set_defaults(kv="paged", backend=BACKENDS[0])


def _add_sampling(p: argparse.ArgumentParser) -> None:
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


def _add_thinking(group: argparse._ArgumentGroup) -> None:
    think = group.add_mutually_exclusive_group()
    think.add_argument("--think", dest="think", action="store_true", default=None, help="let the model think")
    think.add_argument("--no-think", dest="think", action="store_false", help="answer without thinking")
    group.add_argument(
        "--no-thinking-output", action="store_true", help="write the answer alone, not the thinking before it"
    )


def main(argv: list[str] | None = None) -> int:
    """Runs a command; returns its exit status: 0, 2 for usage, 1 for the rest."""
    _prepare_streams()
    program = "qwen-rs"
    try:
        args = _parser().parse_args(argv)
        program = f"qwen-rs {args.command}"
        _check_integers(args)
        if sys.stdout is None:
            raise OSError("standard output is closed")
        run = {"generate": _generate, "chat": _chat, "serve": serve.run, "bench": bench_serve.run}
        status = run[args.command](args)
        sys.stdout.flush()
    except SystemExit as end:  # --help, --version, or a usage error that has had its line
        status = int(end.code or 0)
    except BrokenPipeError:
        status = _fail(program, "standard output was closed", 1)
    except KeyboardInterrupt:
        status = _fail(program, "interrupted", INTERRUPTED)
    except ValueError as error:
        status = _fail(program, error, 2)
    except OSError as error:
        status = _fail(program, _os_error(error), 1)
    except (ModelError, CacheError) as error:
        status = _fail(program, error, 1)
    except MemoryError as error:
        status = _fail(program, str(error) or "out of memory", 1)
    _drop_unwritten()
    return status


def _prepare_streams() -> None:
    """Gives closed standard streams the null device, and standard output a way to show every character.

    Without the first, the next file that is opened, a checkpoint's, would take a closed stream's
    descriptor; and ``print(file=None)`` would write notices into the text.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free descriptor: this one
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
    warned = False

    def replace(error: UnicodeError) -> tuple[str | bytes, int]:
        nonlocal warned
        if not warned:
            warned = True
            print(
                f"warning: {sys.stdout.encoding}, the encoding of standard output, lacks characters of the "
                "text; they are written as \\uXXXX (PYTHONIOENCODING=utf-8 has them all)",
                file=sys.stderr,
            )
        return codecs.backslashreplace_errors(error)

    codecs.register_error("qwen_rs.replace", replace)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="qwen_rs.replace")


def _drop_unwritten() -> None:
    """Sends to the null device what cannot be written, else Python would try again, and fail, at exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _check_integers(args: argparse.Namespace) -> None:
    """Refuses what no 64-bit integer holds; narrower ranges stand where the numbers are used."""
    for name, value in vars(args).items():
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, int) and not -(2**63) <= number < 2**64:
                raise ValueError(f"--{name.replace('_', '-')}: {number} is out of range")


def _fail(program: str, message: object, status: int) -> int:
    line = " ".join(str(message).split())
    with contextlib.suppress(OSError):  # standard error may be what failed
        print(f"{program}: {line}", file=sys.stderr)
    return status


def _os_error(error: OSError) -> str:
    if error.strerror is None:
        return str(error)
    # A system call that names no file wrote to a standard stream.
    return f"{error.filename or 'standard output'}: {error.strerror}"


def _generate(args: argparse.Namespace) -> int:
    if args.metrics == "json":
        # All of standard error is one document: what else would stand there is a field of it.
        with contextlib.redirect_stderr(io.StringIO()) as said:
            metrics, ops = _write_text(args)
        document = metrics.as_dict() | {"notices": said.getvalue().splitlines()}
        if args.trace_ops:
            fields = ("phase", "op", "calls", "milliseconds")
            document["ops"] = [dict(zip(fields, op, strict=True)) for op in ops]
        print(json.dumps(document), file=sys.stderr)
        return 0
    metrics, ops = _write_text(args)
    if args.trace_ops:
        print(trace_table(ops), file=sys.stderr)
    if args.metrics == "text":
        print(f"\n{metrics.text()}", end="", file=sys.stderr)
    return 0


def _chat(args: argparse.Namespace) -> int:
    system = None if args.system is None else _utf8("--system", args.system)
    params = _params(args)
    with _load(args) as llm:
        terminal_chat.run(llm, params, system=system, think=args.think, thinking=not args.no_thinking_output)
    return 0


def _params(args: argparse.Namespace) -> SamplingParams:
    return SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repetition_penalty=args.repeat_penalty,
        seed=args.seed,
        stop=[_utf8("--stop", text) for text in args.stop],
    )


def _write_text(args: argparse.Namespace) -> tuple[Metrics, list[tuple[Any, str, int, float]]]:
    """Streams the text; returns what it took and, with ``--trace-ops``, the operations' statistics."""
    params = _params(args)
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
        display = Display(opened, thinking=not args.no_thinking_output, chat=chat)
        llm.model.trace_ops(args.trace_ops)
        try:
            for piece in llm.pieces(state):
                sys.stdout.write(display.push(piece.text))
                sys.stdout.flush()
            sys.stdout.write(display.flush())
        finally:  # a message about an interruption gets a line of its own
            if display.in_a_line:
                sys.stdout.write("\n")
            sys.stdout.flush()
        return llm.output(state).metrics, llm.model.op_stats() if args.trace_ops else []


def _prompt(args: argparse.Namespace) -> str:
    if args.prompt == "-":
        prompt = _standard_input()
    elif args.prompt is None and args.model is None:
        prompt = DEMO_PROMPT
    elif args.prompt is None:
        raise ValueError("--prompt TEXT is needed (--prompt - reads standard input)")
    else:
        prompt = _utf8("--prompt", args.prompt)
    if not prompt:
        raise ValueError("the prompt is empty")
    if args.model is None:
        shown = f" Prompt: {prompt}" if args.prompt is None else ""
        print(
            f"No --model given: running the bundled demo, a small Qwen3 trained on Jane Austen.{shown}",
            file=sys.stderr,
        )
    return prompt


def _standard_input() -> str:
    if sys.stdin is None:
        raise OSError("standard input is closed")
    encoding = sys.stdin.encoding or "utf-8"
    if codecs.lookup(encoding).name == "ascii":
        encoding = "utf-8"  # which has ASCII in it
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding=encoding, errors="strict")
    try:
        text = sys.stdin.read(MAX_PROMPT + 1)
    except UnicodeDecodeError:
        raise ValueError(f"standard input is not valid {encoding.upper()}") from None
    except OSError as error:
        raise OSError(f"standard input: {error.strerror or error}") from None
    if len(text) > MAX_PROMPT:
        raise ValueError(f"standard input is larger than a prompt can be ({MAX_PROMPT} characters)")
    return text


def _utf8(option: str, value: str) -> str:
    """An argument's text. In a locale without UTF-8 (``LANG=C``), Python escapes its bytes as surrogates.

    Raises:
        ValueError: the argument's bytes are not UTF-8.
    """
    try:
        value.encode()
        return value
    except UnicodeEncodeError:
        pass
    try:
        return os.fsencode(value).decode()
    except UnicodeError:
        raise ValueError(f"{option} is not valid UTF-8") from None


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
