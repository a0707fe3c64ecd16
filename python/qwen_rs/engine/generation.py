"""The generation loop: one for all sequences of an ``LLM``, whoever waits for them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator

from .._core import Engine, Event
from .outputs import Piece
from .sequence import SequenceState


class Generation:
    """Runs the engine's steps for whoever waits.

    No thread of its own: of the callers that wait for tokens one leads, which is to say it runs steps and
    deals out what comes of them, until it has something for itself; then another one that waits leads on.
    So a single caller hands nothing over, Ctrl-C interrupts the step that it ran, and nothing runs while
    nobody waits.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.process = os.getpid()
        self._sequences: dict[int, SequenceState] = {}
        self._turn = threading.Condition()
        self._leader: int | None = None

    @property
    def leads(self) -> bool:
        """Whether this thread is inside a step: a signal handler finds it so."""
        return self._leader == threading.get_ident()

    def submit(self, sequence: SequenceState) -> None:
        """Puts a sequence into the queue.

        Raises:
            CacheError: it could never fit.
        """
        with self._turn:  # no event comes before the sequence is known
            sequence.id = self.engine.submit(sequence.prompt_ids, **sequence.settings())
            self._sequences[sequence.id] = sequence
        self._allow(sequence)

    def cancel(self, sequence: SequenceState) -> None:
        """Lets go of a sequence, if it has not ended."""
        if self._sequences.pop(sequence.id, None) is not None:
            self.engine.cancel(sequence.id)

    def pieces(self, sequence: SequenceState) -> Iterator[Piece]:
        """Runs a sequence to its end; gives what each token sets free.

        Raises:
            CacheError, ModelError, MemoryError: what ended it.
        """
        self.submit(sequence)
        try:
            while sequence.finish_reason is None:
                self.advance(sequence)
                while sequence.texts:
                    text = sequence.texts.popleft()
                    last = sequence.finish_reason is not None and not sequence.texts
                    if text or last:
                        yield sequence.piece(text, last=last)
        finally:
            self.cancel(sequence)

    def finish(self, sequences: list[SequenceState]) -> Iterator[SequenceState]:
        """Runs sequences to their ends; gives each when it has ended.

        Raises:
            CacheError, ModelError, MemoryError: what ended one; the others are let go then.
        """
        submitted: list[SequenceState] = []
        try:
            for sequence in sequences:
                self.submit(sequence)
                submitted.append(sequence)
            for sequence in sequences:
                while sequence.finish_reason is None:
                    self.advance(sequence)
                yield sequence
        finally:
            for sequence in submitted:
                self.cancel(sequence)

    def advance(self, sequence: SequenceState) -> None:
        """Returns when a sequence has something new.

        Raises:
            CacheError, ModelError, MemoryError: what ended it.
        """
        with self._turn:
            while not sequence.news and self._leader is not None:
                self._turn.wait()
            if not sequence.news:
                self._leader = threading.get_ident()
        if self.leads:
            try:
                while not sequence.news:
                    self.step()
            finally:
                with self._turn:
                    self._leader = None
                    self._turn.notify_all()
        sequence.news = False
        if sequence.error is not None:
            raise sequence.error

    def step(self, wait: float = 0.05) -> list[SequenceState]:
        """One step of the engine; returns the sequences that it has news of."""
        events = self.engine.step(wait)
        with self._turn:  # whoever submits holds it until the sequence is known
            told = {s.id: s for event in events if (s := self._sequences.get(event.id)) is not None}
        for event in events:
            if (sequence := self._sequences.get(event.id)) is not None:
                self._deal(sequence, event)
        if told:
            with self._turn:
                self._turn.notify_all()
        return list(told.values())

    def lead(
        self, told: Callable[[list[SequenceState]], None], going: Callable[[], bool], wait: float
    ) -> None:
        """Runs steps for everybody, from this thread, as long as ``going`` says so.

        Args:
            told: called after each step with the sequences that it had news of.
            going: asked before each step; ``engine.wake`` ends one that waits for work.
            wait: seconds that a step waits for work.
        """
        with self._turn:
            while self._leader is not None:
                self._turn.wait()
            self._leader = threading.get_ident()
        try:
            while going():
                told(self.step(wait))
        finally:
            with self._turn:
                self._leader = None
                self._turn.notify_all()

    def _deal(self, sequence: SequenceState, event: Event) -> None:
        try:
            sequence.take(event)
            if sequence.finish_reason is None and event.token is not None:
                self._allow(sequence)
        except Exception as error:  # of this sequence's text: it is nobody else's
            sequence.fail(error)
        sequence.news = True
        if sequence.finish_reason is not None:
            self._sequences.pop(sequence.id, None)  # another thread may have let go of it
            if not event.last:
                self.engine.cancel(sequence.id)

    def _allow(self, sequence: SequenceState) -> None:
        if sequence.constraint is not None:
            self.engine.allow(sequence.id, sequence.constraint.allowed(sequence.token_ids))
