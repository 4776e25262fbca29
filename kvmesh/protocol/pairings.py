"""Which generations a decoder pairs with: those the registry names, each once, again after a loss, under a rising number.

Called by the decoder's event loop and the simulator, which own the streams and the pauses between two tries.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

from kvmesh.errors import Fenced
from kvmesh.protocol.ids import Generation, PairingNumber, short


@dataclass(slots=True)
class PairingBook:
    """What one decoder process pairs with."""

    _count: int = 0
    _named: set[Generation] = field(default_factory=set)
    _kept: set[Generation] = field(default_factory=set)
    """Being paired with, or paired, or about to be again."""
    _standing: dict[Generation, PairingNumber] = field(default_factory=dict)
    _falling: dict[Generation, PairingNumber] = field(default_factory=dict)
    """A stream is lost, and the last words of others are still heard."""

    @property
    def standing(self) -> list[Generation]:
        """Generations whose pairing stands."""
        return list(self._standing)

    def named(self, generations: Collection[Generation]) -> tuple[list[Generation], list[Generation]]:
        """The registry's live list. Returns whom to begin with, and whom to give up: no longer named and not standing.

        A pairing that stands is not ended by a registry: its streams end it.
        """
        self._named = set(generations)
        begin = [g for g in generations if g not in self._kept]
        ends_by_itself = self._standing.keys() | self._falling.keys()
        give_up = sorted(g for g in self._kept if g not in self._named and g not in ends_by_itself)
        self._kept.update(begin)
        self._kept.difference_update(give_up)
        return begin, give_up

    def next_number(self) -> PairingNumber:
        """For the next try. Numbers rise for the life of the process, whatever they are used for."""
        self._count += 1
        return PairingNumber(self._count)

    def stands(self, generation: Generation, number: PairingNumber) -> None:
        """A pairing was made."""
        self._standing[generation] = number

    def falls(self, generation: Generation, number: PairingNumber) -> bool:
        """A stream is lost: no room gets the pairing any more. Returns whether it stood until now."""
        stood = self._standing.get(generation) == number
        if stood:
            self._falling[generation] = self._standing.pop(generation)
        return stood

    def lost(self, generation: Generation, number: PairingNumber) -> bool:
        """A try or a pairing ended. Returns whether it had stood: then its rooms must hear of it."""
        self.falls(generation, number)
        stood = self._falling.get(generation) == number
        if stood:
            del self._falling[generation]
        return stood

    def may_pair_again(self, generation: Generation) -> bool:
        """Whether, after a loss, to try again: while the registry names it."""
        return generation in self._named and generation in self._kept

    def over(self, generation: Generation) -> None:
        """It is not tried again: the generation is over, or does not fit."""
        self._kept.discard(generation)

    def require(self, generation: Generation) -> PairingNumber:
        """The pairing for a room.

        Raises:
            Fenced: none stands with that generation.
        """
        number = self._standing.get(generation)
        if number is None:
            raise Fenced(f"no pairing stands with generation {short(generation)}", reason="not_paired")
        return number
