"""What a member obeys: the highest term it has seen, and generations that only rise.

Called by stages and decoders at the edges where directives, streams and rooms come in. Knows no stream.
"""

from dataclasses import dataclass

from kvmesh.errors import Fenced
from kvmesh.protocol.ids import Generation, RoomId, Term, short, term_of


@dataclass(slots=True)
class Fence:
    """The highest term and generation seen by one process."""

    term: Term = Term(0)
    generation: Generation = Generation(0)

    def hear_term(self, term: Term) -> None:
        """A registry spoke under `term`.

        Raises:
            Fenced: a higher term was seen: this registry is stale.
        """
        if term < self.term:
            raise Fenced(f"registry term {term} is below {self.term}, seen before", reason="stale_term")
        self.term = term

    def hear_room(self, room: RoomId) -> None:
        """A room came.

        Raises:
            Fenced: it was minted in a lower term than seen.
        """
        if room == 0 or term_of(room) < self.term:
            raise Fenced(f"room {short(room)} was minted below term {self.term}", reason="stale_term")

    def begin(self, generation: Generation) -> None:
        """A generation begins here.

        Raises:
            Fenced: it is not higher than every one before.
        """
        if generation <= self.generation:
            raise Fenced(f"generation {short(generation)} is not above {short(self.generation)}")
        self.generation = generation
