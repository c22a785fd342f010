"""Which sequences a step runs and in which pages they lie; on the host, knowing only token ids.

    waiting --admission--> running --stop or cancel--> gone
       ^                      |
       +------preemption------+

A sequence is admitted in the order of arrival, once there is a slot for it and pages for all the
tokens it has: those of a known prefix are shared, the others its own. A step feeds one token of
each sequence that is past its prompt, and chunks of prompts up to a budget. Where no page is left
for a next token, the sequence that came last gives its pages back and waits: it is computed again
later, and draws the same tokens. So the first to come always goes on, and all end.

A step is planned while the one before still runs. What that one draws is not known yet: it counts
as `in_flight`, and the device puts it in its place.
"""

import collections
import dataclasses
import itertools
from typing import NamedTuple

from pallas_attn import OutOfPagesError, PageAllocator

from .sampling import Sampling

STOP, LENGTH, CANCELLED = "stop", "length", "cancelled"


@dataclasses.dataclass(frozen=True)
class Request:
    """What is asked for.

    Attributes:
        prompt: Token ids, at least one.
        max_tokens: How many to add at most, at least one.
        sampling: How they are drawn.
        stop_tokens: Each ends the sequence, and is left out.
        stops: Runs of tokens that end it too, and are left out.

    Raises:
        ValueError: For an empty prompt or stop, or max_tokens below 1.
    """

    prompt: tuple[int, ...]
    max_tokens: int = 16
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    stop_tokens: frozenset[int] = frozenset()
    stops: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self):
        if not self.prompt:
            raise ValueError("prompt: got no token, expected at least one")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens: got {self.max_tokens}, expected at least 1")
        if not all(self.stops):
            raise ValueError("stop: got an empty one, expected at least one token")


class Event(NamedTuple):
    """News of one request: tokens that follow those given before, and why it ended, if it did."""

    id: int
    tokens: list[int]
    reason: str | None = None


class Sequence:
    """One request on its way."""

    def __init__(self, number: int, request: Request):
        self.id, self.request = number, request
        self.tokens = list(request.prompt)  # and what was drawn, ends included
        self.pages: list[int] = []
        self.slot = -1  # while it runs
        self.computed = 0  # tokens whose keys are in pages, once all steps planned have run
        self.tabled = 0  # pages that are in its slot's row of the page table
        self.in_flight = 0  # tokens that steps on their way will draw
        self.reason: str | None = None
        self._told = 0  # tokens drawn and given out

    @property
    def drawn(self) -> int:
        """Tokens added to the prompt, those in flight apart."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def ready(self) -> int:
        """Tokens that a next step can feed; 0 where all will have been drawn."""
        if self.drawn + self.in_flight >= self.request.max_tokens:
            return 0
        return len(self.tokens) + self.in_flight - self.computed

    def known(self) -> list[int]:
        """The tokens whose keys are in pages."""
        return self.tokens[: self.computed]

    def take(self, token: int) -> Event:
        """Adds a drawn token, and tells what may be given out: no token that a stop may yet eat."""
        self.in_flight -= 1
        self.tokens.append(token)
        request, keep = self.request, self.drawn
        if token in request.stop_tokens:
            self.reason, keep = STOP, keep - 1
        elif ended := max((len(s) for s in request.stops if self._ends_in(s)), default=0):
            self.reason, keep = STOP, keep - ended
        elif keep == request.max_tokens:
            self.reason = LENGTH
        else:
            begun = (n for s in request.stops for n in range(1, len(s)) if self._ends_in(s[:n]))
            keep -= max(begun, default=0)
        first = len(request.prompt)
        new, self._told = self.tokens[first + self._told : first + keep], max(keep, self._told)
        return Event(self.id, new, self.reason)

    def _ends_in(self, run: tuple[int, ...]) -> bool:
        """Whether the last tokens drawn are these."""
        return self.drawn >= len(run) and tuple(self.tokens[-len(run) :]) == run


class Row(NamedTuple):
    """What a step does for one sequence."""

    sequence: Sequence
    start: int  # the first token's index in the sequence
    count: int  # tokens fed
    draws: bool  # whether the sequence's next token is drawn, all before it being fed

    @property
    def given(self) -> list[int]:
        """The tokens fed, without a last one that is not known yet."""
        return self.sequence.tokens[self.start : self.start + self.count]


class Scheduler:
    """Plans steps; not thread-safe.

    Args:
        num_pages, page_size: Of the pool.
        max_batch: Sequences that run at once.
        max_len: Tokens of a sequence, a multiple of page_size.
        max_tokens: Tokens that one step feeds at most, more than max_batch.

    Raises:
        ValueError: For sizes that do not fit.
    """

    def __init__(
        self, *, num_pages: int, page_size: int, max_batch: int, max_len: int, max_tokens: int
    ):
        if max_batch < 1 or max_len < 1 or max_len % page_size or max_tokens <= max_batch:
            raise ValueError(
                f"{max_batch=} must be at least 1, {max_len=} a multiple of {page_size=} and "
                f"{max_tokens=} more than max_batch"
            )
        self.allocator = PageAllocator(num_pages, page_size)
        self.max_batch, self.max_len, self.max_tokens = max_batch, max_len, max_tokens
        self.running: list[Sequence] = []  # by arrival
        self.waiting: collections.deque[Sequence] = collections.deque()  # by arrival
        self.preemptions = 0
        self.shared_tokens = 0  # found in pages and so not computed
        self._slots = list(range(max_batch - 1, -1, -1))
        self._live: dict[int, Sequence] = {}
        self._numbers = itertools.count()

    @property
    def busy(self) -> bool:
        """Whether a request has not ended."""
        return bool(self._live)

    def submit(self, request: Request) -> int:
        """Queues a request, and gives its number.

        Raises:
            ValueError: As `check`.
        """
        self.check(request)
        sequence = Sequence(next(self._numbers), request)
        self._live[sequence.id] = sequence
        self.waiting.append(sequence)
        return sequence.id

    def check(self, request: Request) -> None:
        """Tells whether a request can ever run.

        Raises:
            ValueError: It cannot: it is longer than a sequence or the pool may be.
        """
        total, size = len(request.prompt) + request.max_tokens, self.allocator.page_size
        most = min(self.max_len, self.allocator.num_pages * size)
        if total > most:
            raise ValueError(
                f"max_tokens: got {request.max_tokens} after a prompt of {len(request.prompt)} "
                f"tokens, expected {most} in all at most"
            )

    def cancel(self, number: int) -> Event | None:
        """Ends a request at once; None where it has ended already."""
        sequence = self._live.get(number)
        if sequence is None:
            return None
        sequence.reason = CANCELLED
        self._end(sequence)
        return Event(number, [], CANCELLED)

    def plan(self) -> list[Row]:
        """Chooses what the next step does, and counts it as done; empty where nothing can."""
        fed: list[tuple[Sequence, int]] = []
        before = self.preemptions
        for sequence in list(self.running):
            # One that is preempted in this loop comes later in it, and has no slot then.
            if sequence.slot >= 0 and sequence.ready == 1 and self._grow(sequence):
                fed.append((sequence, 1))
        budget = self.max_tokens - len(fed)
        for sequence in self.running:
            if sequence.ready > 1 and budget:  # a prompt on its way; 1 was dealt with above
                fed.append((sequence, min(sequence.ready, budget)))
                budget -= fed[-1][1]
        while self.preemptions == before and budget and (admitted := self._admit()):
            fed.append((admitted, min(admitted.ready, budget)))
            budget -= fed[-1][1]
        return [self._commit(sequence, count) for sequence, count in fed]

    def finish(self, rows: list[Row], drawn: list[int]) -> list[Event]:
        """Takes what a step drew, one token a row."""
        events = []
        for row, token in zip(rows, drawn, strict=True):
            sequence = row.sequence
            # One that was ended after the step was planned has no use for it.
            if row.draws and sequence.reason is None:
                event = sequence.take(token)
                if event.reason is not None:
                    self._end(sequence)
                if event.tokens or event.reason:
                    events.append(event)
        return events

    def _commit(self, sequence: Sequence, count: int) -> Row:
        draws = count == sequence.ready
        row = Row(sequence, sequence.computed, count, draws)
        sequence.computed += count
        sequence.in_flight += draws
        if draws and (count > 1 or not sequence.drawn):
            # Steps run in order: the keys are there before anyone who is admitted now reads them.
            self.allocator.publish(sequence.known(), sequence.pages)
        return row

    def _admit(self) -> Sequence | None:
        """Starts the first that waits, if there is room."""
        if not self.waiting or not self._slots:
            return None
        sequence, allocator = self.waiting[0], self.allocator
        # The last token is computed again in any case: the next one is drawn from it.
        pages, known = allocator.match(sequence.tokens[:-1])
        own = -(-len(sequence.tokens) // allocator.page_size) - len(pages)
        # A page for each that runs, or the newcomer would soon be preempted by one of them.
        if own + len(self.running) > allocator.num_free:
            allocator.release(pages)
            return None
        sequence.pages = pages + allocator.allocate(own)
        sequence.computed, sequence.slot = known, self._slots.pop()
        self.shared_tokens += known
        self.running.append(self.waiting.popleft())
        return sequence

    def _grow(self, sequence: Sequence) -> bool:
        """Sees to a page for the next token, taking those of others that came later."""
        while sequence.computed >= len(sequence.pages) * self.allocator.page_size:
            try:
                sequence.pages += self.allocator.allocate()
            except OutOfPagesError:
                last = self.running[-1]
                self._leave(last)
                last.computed = 0
                self.waiting.appendleft(last)
                self.preemptions += 1
                if last is sequence:
                    return False
        return True

    def _leave(self, sequence: Sequence) -> None:
        """Takes a sequence's slot and pages away; what they hold stays known while it can."""
        self.allocator.publish(sequence.known(), sequence.pages)
        self.allocator.release(sequence.pages)
        self._slots.append(sequence.slot)
        self.running.remove(sequence)
        sequence.pages, sequence.slot, sequence.tabled = [], -1, 0

    def _end(self, sequence: Sequence) -> None:
        del self._live[sequence.id]
        if sequence.slot >= 0:
            self._leave(sequence)
        else:
            self.waiting.remove(sequence)


__all__ = ["CANCELLED", "LENGTH", "STOP", "Event", "Request", "Row", "Scheduler", "Sequence"]
