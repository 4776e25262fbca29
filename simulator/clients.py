"""What clients see: the half of the witness that follows requests (invariants 5 and 6). Called by gateways and by the run.

A request may end badly only for a reason that something gave it: without a fault, or with none but the registry's, it ends
well, is cancelled, refused at a limit, or finds no pair.
"""

from dataclasses import dataclass
from math import inf
from typing import Any

from kvmesh.protocol.directives import Grant
from kvmesh.protocol.ids import RoomId, short
from kvmesh.protocol.request import LOST_STEP, Request
from simulator.messages import Generate, Tokens, token_of
from simulator.violation import Violation

ALWAYS_RIGHT = frozenset({"", "cancelled", "deadline", "no_pair", "full"})
"""Ends that need no fault: well, by the client, by its time, by limits."""


@dataclass(slots=True)
class RequestBooks:
    """One request, as its client sees it."""

    num_tokens: int = 0
    end: str | None = None
    moved_at: float = 0.0
    """When something was last done for it."""
    holds: bool = False
    """Its room has its pages: what it waits for is work, not a place."""


class ClientBooks:
    """Every request of one world."""

    def __init__(self) -> None:
        self.requests: dict[int, RequestBooks] = {}
        self.rooms: dict[RoomId, int] = {}
        """Of each room that was given out, its request."""
        self.calm = False
        """Nothing goes wrong in this run, but with the registry."""
        self.disturbed_at = 0.0
        """When something last went wrong, or was mended."""
        self.patience_seconds = inf
        """A request that holds its pages and is not served for so long, with nothing wrong, is stuck."""

    def arrived(self, request: int) -> None:
        """A client asks."""
        self.requests[request] = RequestBooks()

    def granted(self, process: Any, number: int, grant: Grant) -> None:
        """A request was given a room."""
        if grant.room in self.rooms:
            raise Violation(5, f"room {short(grant.room)} was given out twice", grant.room)
        self.rooms[grant.room] = number
        self._moved(process, grant.room, holds=False)

    def held(self, process: Any, generate: Generate) -> None:
        """A request's room has its pages."""
        self._moved(process, generate.room, holds=True)

    def served(self, process: Any, room: RoomId) -> None:
        """Rank 0 wrote a step with work for a room."""
        self._moved(process, room, holds=True)

    def _moved(self, process: Any, room: RoomId, *, holds: bool) -> None:
        books = self.requests[self.rooms[room]]
        books.moved_at, books.holds = process.now, holds

    def delivered(self, process: Any, wish: Any, tokens: Tokens) -> None:
        """A client got tokens."""
        books = self.requests[wish.number]
        books.moved_at = process.now
        for token in tokens.tokens:
            right = token_of(wish.number, books.num_tokens)
            if books.end is not None or token != right or books.num_tokens >= wish.output_len:
                said = f"token {token} came as the {books.num_tokens}-th of request {wish.number}, {right} is right"
                raise Violation(5, said, wish.number)
            books.num_tokens += 1

    def answered(self, process: Any, wish: Any, reason: str, request: Request | None = None) -> None:
        """A request ended: with its last token, or by a reason.

        Args:
            request: the gateway's own books; None where the gateway itself is gone.
        """
        books = self.requests[wish.number]
        if books.end is not None:
            raise Violation(5, f"request {wish.number} ended twice", wish.number)
        if not reason and books.num_tokens != wish.output_len:
            raise Violation(5, f"request {wish.number} ended well after {books.num_tokens} tokens", wish.number)
        if request is not None:
            self._check_end(process, wish, reason, request)
        books.end = reason

    def _check_end(self, process: Any, wish: Any, reason: str, request: Request) -> None:
        number, books, failures = wish.number, self.requests[wish.number], request.failures
        if self.calm and reason not in ALWAYS_RIGHT:
            raise Violation(6, f"request {number} ended by {reason!r}, and nothing had gone wrong", number)
        stuck = process.now - max(books.moved_at, self.disturbed_at)
        if reason == "deadline" and books.holds and stuck > self.patience_seconds:
            raise Violation(6, f"request {number} held its pages and was not served for {stuck:.1f} s", number)
        gave_up = failures and reason not in ALWAYS_RIGHT
        if gave_up and len(failures) < request.max_attempts and failures.count(LOST_STEP) < 2:
            raise Violation(5, f"request {number} was given up after {failures}", number)
        if failures.count(LOST_STEP) > 2:
            raise Violation(5, f"request {number} was tried again after {failures}", number)
