"""The generation loop: one for all sequences of an ``LLM``, whoever waits for them."""

from __future__ import annotations

import itertools
import os
import threading
from collections import deque
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
        self._events: deque[Event] = deque()

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
        with self._turn:
            known = self._sequences.pop(sequence.id, None)
        if known is not None:
            self.engine.cancel(sequence.id)

    def pieces(self, sequence: SequenceState) -> Iterator[Piece]:
        """Runs a sequence to its end; gives what each token sets free.

        Raises:
            CacheError, ModelError, MemoryError: what ended it.
        """
        try:
            self.submit(sequence)
            ended = False
            while not ended:
                self.advance(sequence)
                with self._turn:  # nobody deals meanwhile
                    pieces, ended = sequence.pieces(), sequence.finish_reason is not None
                yield from pieces
                if sequence.error is not None:
                    raise sequence.error
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
                submitted.append(sequence)
                self.submit(sequence)
            for sequence in sequences:
                while sequence.finish_reason is None:
                    self.advance(sequence)
                if sequence.error is not None:
                    raise sequence.error
                yield sequence
        finally:
            for sequence in submitted:
                self.cancel(sequence)

    def advance(self, sequence: SequenceState) -> None:
        """Returns when a sequence has something new, or has ended."""
        try:
            with self._turn:
                while not sequence.news and self._leader is not None:
                    self._turn.wait()
                if not sequence.news:
                    self._leader = threading.get_ident()
            if self.leads:
                while not sequence.news:
                    self.step()
        finally:
            if self.leads:
                self._give_up_the_lead()
        sequence.news = False

    def step(self, wait: float = 0.05) -> list[SequenceState]:
        """One step of the engine; returns the sequences that it has news of."""
        # No bytecode lies between the step and the store: what Ctrl-C leaves untold is told the next time.
        self._events.extend(itertools.chain.from_iterable(map(self.engine.step, (wait,))))
        told: dict[int, SequenceState] = {}
        with self._turn:
            while self._events:
                event = self._events.popleft()
                if (sequence := self._sequences.get(event.id)) is not None:
                    told[sequence.id] = sequence
                    self._deal(sequence, event)
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
            self._give_up_the_lead()

    def _give_up_the_lead(self) -> None:
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
        except BaseException:  # Ctrl-C, of whoever leads
            sequence.fail(RuntimeError("an interrupt came between a token and its text"))
            raise
        finally:
            sequence.news = True
            if sequence.finish_reason is not None:
                del self._sequences[sequence.id]
                if not event.last:
                    self.engine.cancel(sequence.id)

    def _allow(self, sequence: SequenceState) -> None:
        if sequence.constraint is not None:
            self.engine.allow(sequence.id, sequence.constraint.allowed(sequence.token_ids))
