"""``qwen-rs chat``: a conversation in the terminal, or through a pipe."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ._core import CacheError, ModelError
from .checkpoint.reasoning import split_reasoning
from .display import Display
from .engine.conversations import as_conversation
from .engine.llm import LLM
from .engine.metrics import Metrics
from .engine.sampling_params import SamplingParams, choice_seed

HELP = """\
/system TEXT   set the system message; without TEXT take it away
/think, /no-think
               let the model think before it answers, or not
/regenerate    another answer to the last message
/save FILE     write the conversation as JSON
/load FILE     go on with one that was saved
/stats         what the last answer took
/help          this list
/quit          end (also Ctrl-D)
Ctrl-C stops an answer. Alt-Enter begins a new line. A line that begins with // is said with one /."""


class Stop(Exception):
    """The conversation ends."""


class Conversation:
    """The messages so far, and how they go on.

    Args:
        llm: with a paged cache, in which each turn starts from what the last one left.
        params: of every answer.
        system: the system message.
        think: the template's thinking switch; None leaves it to the template.
        thinking: whether the thinking is shown.
    """

    def __init__(
        self, llm: LLM, params: SamplingParams, *, system: str | None, think: bool | None, thinking: bool
    ) -> None:
        self.llm, self.params, self.think, self.thinking = llm, params, think, thinking
        self.messages: list[dict[str, Any]] = []
        self.stats: Metrics | None = None
        self._again = 0
        if system:
            self._system(system)
        self.commands: dict[str, Callable[[str], None]] = {
            "system": self._system,
            "think": lambda _: self._switch(True),
            "no-think": lambda _: self._switch(False),
            "regenerate": lambda _: self._regenerate(),
            "save": self._save,
            "load": self._load,
            "stats": lambda _: self._show_stats(),
            "help": lambda _: print(HELP, file=sys.stderr),
            "quit": lambda _: self._quit(),
        }

    def take(self, line: str) -> None:
        """One line of the user's: a message, or something said to the program.

        Raises:
            Stop: it was the last.
        """
        try:
            if line.startswith("/") and not line.startswith("//"):
                name, _, rest = line[1:].partition(" ")
                if name not in self.commands:
                    raise ValueError(f"there is no /{name}; /help lists what there is")
                self.commands[name](rest.strip())
            elif line.strip():
                self._again = 0
                self._answer([*self.messages, {"role": "user", "content": line.removeprefix("/")}])
        except (ValueError, ModelError, CacheError, MemoryError) as error:
            _say(str(error) or "out of memory")
        except BrokenPipeError:
            raise
        except OSError as error:
            _say(f"{error.filename}: {error.strerror}" if error.filename else str(error))

    def _answer(self, messages: list[dict[str, Any]]) -> None:
        """Answers; the messages stay as they were if there is no answer."""
        llm = self.llm
        prompt = llm.chat_prompt(messages, enable_thinking=self.think)
        seed = self.params.seed
        params = self.params if seed is None else replace(self.params, seed=choice_seed(seed, self._again))
        sequence = llm.start(prompt.token_ids, params)
        display = Display(prompt.thinking, thinking=self.thinking, chat=True)
        stopped = False
        pieces = llm.pieces(sequence)
        try:
            for piece in pieces:
                _write(display.push(piece.text))
        except KeyboardInterrupt:
            stopped = True
        finally:
            pieces.close()  # type: ignore[attr-defined]  # a generator
        _write(display.flush() + ("\n" if display.in_a_line else ""))
        content = split_reasoning(sequence.text, opened=prompt.thinking)[1]
        if stopped and not content.strip():
            _say("stopped before the answer: the message is taken back")
            return
        self.messages = [*messages, {"role": "assistant", "content": content}]
        if stopped:
            _say("stopped: what there is of the answer stays")
        else:
            self.stats = llm.output(sequence).metrics
            if sequence.finish_reason == "length":
                _say("the answer is cut off: its tokens, or the context, are at their end")

    def _regenerate(self) -> None:
        if not self.messages or self.messages[-1]["role"] != "assistant":
            raise ValueError("there is no answer yet")
        self._again += 1
        self._answer(self.messages[:-1])

    def _system(self, text: str) -> None:
        rest = [m for m in self.messages if m["role"] != "system"]
        self.messages = [{"role": "system", "content": text}, *rest] if text else rest

    def _switch(self, think: bool) -> None:
        self.think = think

    def _save(self, name: str) -> None:
        path = _path(name, "save")
        fresh = path.with_name(f"{path.name}.{os.getpid()}.part")
        try:
            text = json.dumps(self.messages, ensure_ascii=False, indent=1)
            fresh.write_text(text + "\n", encoding="utf-8")
            fresh.replace(path)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from None
        finally:
            fresh.unlink(missing_ok=True)

    def _load(self, name: str) -> None:
        path = _path(name, "load")
        try:
            loaded = as_conversation(json.loads(path.read_text(encoding="utf-8")))
            if loaded[-1]["role"] == "user":
                raise ValueError("it ends with a message that has no answer")
        except (ValueError, RecursionError) as error:  # JSON's and UTF-8's errors are of the kind
            raise ValueError(f"{path}: no conversation: {str(error).splitlines()[0]}") from None
        self.messages, self._again = loaded, 0
        _say(f"{len(loaded)} messages")

    def _show_stats(self) -> None:
        if (m := self.stats) is None:
            raise ValueError("there is no whole answer yet")
        speed = m.decode_tokens_per_second
        _say(
            f"prompt {m.prompt_tokens} tokens, {m.cached_tokens} of them from the cache; first token after "
            f"{m.time_to_first_token_ms:.0f} ms; {m.generated_tokens} tokens"
            + ("" if speed is None else f" at {speed:.1f} a second")
            + f"; seed {m.seed}"
        )

    def _quit(self) -> None:
        raise Stop


def run(llm: LLM, params: SamplingParams, *, system: str | None, think: bool | None, thinking: bool) -> None:
    """Holds a conversation until its input ends.

    Raises:
        ValueError: the checkpoint has no chat template.
    """
    if llm.chat_template is None:
        raise ValueError(f"{llm.directory}: the checkpoint has no chat template, so it holds no conversation")
    conversation = Conversation(llm, params, system=system, think=think, thinking=thinking)
    try:
        for line in _typed() if sys.stdin.isatty() and sys.stdout.isatty() else _piped():
            conversation.take(line)
    except Stop:
        pass


def _typed() -> Iterator[str]:
    """What is typed: Enter ends a message, Alt-Enter begins a new line in it."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    session: PromptSession[str] = PromptSession(history=InMemoryHistory(), key_bindings=keys)
    _say("/help lists what can be said to the program; Ctrl-D ends")
    while True:
        try:
            yield session.prompt("> ")
        except KeyboardInterrupt:
            continue  # the line is taken back
        except EOFError:
            return


def _piped() -> Iterator[str]:
    try:
        for line in sys.stdin:
            yield line.removesuffix("\n")
    except UnicodeDecodeError:
        raise ValueError("standard input is not valid UTF-8") from None


def _path(name: str, command: str) -> Path:
    if not name:
        raise ValueError(f"/{command} needs a file's name")
    return Path(name).expanduser()


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _say(text: str) -> None:
    print(" ".join(text.split()), file=sys.stderr)
