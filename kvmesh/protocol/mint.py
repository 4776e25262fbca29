"""What only the registry makes: room ids, generations, and the order of admissions. One for each term."""

from dataclasses import dataclass

from kvmesh.protocol.ids import Generation, RoomId, Term, compose


@dataclass(slots=True)
class Mint:
    """Counts from 1; nothing is ever given out twice, as no two registries have one term."""

    term: Term
    rooms: int = 0
    generations: int = 0
    orders: int = 0

    def room(self) -> RoomId:
        """The next room."""
        self.rooms += 1
        return RoomId(compose(self.term, self.rooms))

    def generation(self) -> Generation:
        """The next generation."""
        self.generations += 1
        return Generation(compose(self.term, self.generations))

    def order(self) -> int:
        """The next place in the order of admissions."""
        self.orders += 1
        return self.orders
