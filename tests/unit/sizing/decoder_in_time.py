"""A decoder in virtual time: its real books, rooms whose KV takes a while to come, and steps that take as long as they do."""

import heapq
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvmesh.protocol.ids import Generation, RoomId
from kvmesh.protocol.rooms import Action, Ask, DecoderRooms, Limits, RoomEvent
from kvmesh.sizing.given import Given


@dataclass
class Decoder:
    """One decoder, and what was seen of it."""

    given: Given
    rate: float
    receiving_seconds: float
    """Mean from a room's reservation until it is complete, exponential."""
    seed: int
    pages: list[tuple[float, float]] = field(default_factory=list)
    """(pages in use, seconds)."""
    rooms: list[tuple[float, float]] = field(default_factory=list)
    """(rooms that hold pages, seconds)."""
    gaps: list[tuple[float, float]] = field(default_factory=list)
    """(seconds of a step, rooms in it)."""

    def run(self, num_rooms: int) -> "Decoder":
        given, self._chance, self._now = self.given, random.Random(self.seed), 0.0
        self._books = DecoderRooms(
            Limits(given.decoder_pages, given.page_size, 10**6, given.max_running_rooms, max_waiting_rooms=10**6)
        )
        self._coming: list[tuple[float, RoomId]] = []
        self._arrivals = [(self._chance.expovariate(self.rate), RoomId(1))]
        left: dict[RoomId, int] = {}
        while self._arrivals[0][1] <= num_rooms:
            began = self._now
            rooms = len(left)
            complete = self._until(began + given.step_seconds(rooms) if rooms else None)
            if rooms:
                self.gaps.append((self._now - began, rooms))
            for room in list(left):
                left[room] -= 1
                if left[room] == 0:
                    del left[room]
                    self._carry_out(self._books.tell(room, RoomEvent.FINISHED))
            left |= {room: self._output_len() - 1 for room in complete}
        return self

    def _output_len(self) -> int:
        """2 or more; geometric, so of all lengths."""
        return 2 + int(self._chance.expovariate(1 / (self.given.output_tokens - 1.5)))

    def _until(self, end: float | None) -> list[RoomId]:
        """Lives until then, or until something happens; returns the rooms that became complete."""
        complete: list[RoomId] = []
        while True:
            arrives, comes = self._arrivals[0][0], self._coming[0][0] if self._coming else float("inf")
            then = min(arrives, comes)
            if end is not None and then > end:
                self._look(end)
                return complete
            self._look(then)
            if then == arrives:
                self._arrive(self._arrivals.pop()[1])
            else:
                complete.append(heapq.heappop(self._coming)[1])
                self._carry_out(self._books.tell(complete[-1], RoomEvent.COMPLETE))
            if end is None:
                return complete

    def _look(self, now: float) -> None:
        used = self.given.decoder_pages - self._books.free_pages
        self.pages.append((used, now - self._now))
        self.rooms.append((self._books.running_rooms, now - self._now))
        self._now = now

    def _arrive(self, room: RoomId) -> None:
        prompt_len = max(1, round(self._chance.choice(self.given.prompt.points)))
        asked = {"prompt_len": prompt_len, "max_output_len": self.given.max_output_tokens}
        self._carry_out(self._books.open(room, Generation(1), **asked))
        self._arrivals.append((self._now + self._chance.expovariate(self.rate), RoomId(room + 1)))

    def _carry_out(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if action.ask is Ask.ADMIT:
                heapq.heappush(
                    self._coming, (self._now + self._chance.expovariate(1 / self.receiving_seconds), action.room)
                )


def mean(weighted: Sequence[tuple[float, float]]) -> float:
    return sum(value * weight for value, weight in weighted) / sum(weight for _, weight in weighted)


def p95(weighted: Sequence[tuple[float, float]]) -> float:
    left = 0.95 * sum(weight for _, weight in weighted)
    for value, weight in sorted(weighted):
        left -= weight
        if left <= 0:
            return value
    raise AssertionError("nothing was seen")
