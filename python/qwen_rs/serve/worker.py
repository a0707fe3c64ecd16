"""The thread that runs the engine's steps, and how asyncio hears of them."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import dataclass

from ..engine.generation import Generation
from ..engine.llm import LLM
from ..engine.sequence import SequenceState
from .errors import RequestError
from .measures import Clock, Measures

IDLE_WAIT = 1.0
"""Seconds that a step waits for work, and so how often an idle engine beats."""
MAX_BEHIND = 4096
"""Tokens that a reader may be behind before its request is cancelled."""


@dataclass
class News:
    """What a sequence has that its reader has not taken."""

    text: str = ""
    tokens: int = 0
    """How many tokens it has in all."""
    finish_reason: str | None = None


class Reader:
    """One sequence as asyncio sees it: what the reader has not taken yet is merged, so that a slow reader
    costs no more than its text."""

    def __init__(self, sequence: SequenceState, changed: asyncio.Event) -> None:
        self.sequence, self.changed = sequence, changed
        self.news: News | None = None
        self.taken = 0
        """Tokens that the reader has taken."""
        self.ended = False
        self.clock = Clock()

    def tell(self, news: News) -> None:
        """Adds what is new to what has not been taken."""
        if self.news is not None:
            news.text = self.news.text + news.text
        self.news = news
        self.changed.set()

    @property
    def tokens(self) -> int:
        """Tokens that are known of."""
        return self.taken if self.news is None else self.news.tokens

    @property
    def behind(self) -> int:
        """Tokens that the reader has not taken."""
        return self.tokens - self.taken

    def take(self) -> News | None:
        """What is new, or None."""
        news, self.news = self.news, None
        if news is not None:
            self.taken, self.ended = news.tokens, news.finish_reason is not None
        return news


class Worker:
    """Runs an ``LLM``'s generation in a thread of its own; asyncio is woken once a step.

    Args:
        llm: what generates.
        name: the model's, for its measures.
        max_queued: sequences that may wait beside the ``llm.max_num_seqs`` that run.

    Attributes:
        beat: when the last step ended, as ``time.monotonic`` tells it.
        failure: what ended the thread before it was told to end.
    """

    def __init__(self, llm: LLM, name: str, *, max_queued: int) -> None:
        self.llm, self.max_queued = llm, max_queued
        self.generation: Generation = llm.generation
        self.measures = Measures(self.generation.engine, name)
        self.beat = time.monotonic()
        self.failure: BaseException | None = None
        self._loop = asyncio.get_running_loop()
        self._readers: dict[int, Reader] = {}
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def live(self) -> int:
        """Sequences that run or wait."""
        return len(self._readers)

    def submit(self, sequences: list[SequenceState]) -> list[Reader]:
        """Puts sequences into the queue, all of them or none.

        Raises:
            RequestError: the queue is full, or one of them could never fit.
        """
        most = self.llm.max_num_seqs + self.max_queued
        if len(sequences) > most:
            raise RequestError(400, f"the request asks for {len(sequences)} answers; the server takes {most}")
        if self.live + len(sequences) > most:
            raise RequestError(
                429, f"{self.live} requests run or wait, and {most} may; try again later", retry_after=1
            )
        changed = asyncio.Event()
        readers = [Reader(sequence, changed) for sequence in sequences]
        try:
            for reader in readers:
                self.generation.submit(reader.sequence)
                self._readers[id(reader.sequence)] = reader
        except Exception as error:
            self.cancel(readers)
            raise RequestError(400, str(error)) from None
        return readers

    def cancel(self, readers: list[Reader]) -> None:
        """Lets go of those that have not ended."""
        for reader in readers:
            if self._readers.pop(id(reader.sequence), None) is not None:
                self.generation.cancel(reader.sequence)
                self.measures.cancelled()

    def close(self) -> None:
        """Ends the thread, after its step."""
        self._stop = True
        self.generation.engine.wake()
        self._thread.join()

    def _run(self) -> None:
        try:
            self.generation.lead(self._stepped, lambda: not self._stop, IDLE_WAIT)
        except BaseException as error:
            self.failure = error
            raise

    def _stepped(self, told: list[SequenceState]) -> None:
        self.beat = time.monotonic()
        news = []
        for sequence in told:
            texts = [sequence.texts.popleft() for _ in range(len(sequence.texts))]
            news.append((sequence, News("".join(texts), len(sequence.token_ids), sequence.finish_reason)))
        if news:
            self._loop.call_soon_threadsafe(self._deal, news)

    def _deal(self, all_news: list[tuple[SequenceState, News]]) -> None:
        for sequence, news in all_news:
            if (reader := self._readers.get(id(sequence))) is None:
                continue
            before = reader.tokens
            reader.tell(news)
            if reader.tokens > before:
                self.measures.token(reader.clock, reader.tokens - before)
            if news.finish_reason is not None:
                del self._readers[id(sequence)]
                self.measures.ended(reader.clock, news.finish_reason, len(sequence.prompt_ids), reader.tokens)
            elif reader.behind > MAX_BEHIND:
                sequence.fail(RequestError(503, "the reader is too slow"))
                self.cancel([reader])
                reader.tell(News("", reader.taken, "error"))
