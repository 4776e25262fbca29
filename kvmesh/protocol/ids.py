"""Identities of the protocol, as types that can't be mixed up. Used by every layer; knows nothing else.

A room id and a generation carry the registry's term in their high bits: 23 bits of term, 40 of count, so 63 bits and
never 0 (terms and counts begin at 1).
"""

from typing import NewType

RoomId = NewType("RoomId", int)
Generation = NewType("Generation", int)
Incarnation = NewType("Incarnation", int)
PairingNumber = NewType("PairingNumber", int)
PageId = NewType("PageId", int)
Rank = NewType("Rank", int)
StepNumber = NewType("StepNumber", int)
Term = NewType("Term", int)
LeaseId = NewType("LeaseId", int)

PairingKey = tuple[Incarnation, PairingNumber]
"""Pairing numbers rise per decoder incarnation, so both name one."""

COUNT_BITS = 40
TERM_BITS = 23
MAX_COUNT = (1 << COUNT_BITS) - 1
MAX_TERM = (1 << TERM_BITS) - 1


def compose(term: Term, count: int) -> int:
    """The 63-bit id of the `count`-th thing minted in `term`.

    Raises:
        ValueError: term or count is 0 or over its bits.
    """
    if not 1 <= term <= MAX_TERM:
        raise ValueError(f"term {term} is outside [1, {MAX_TERM}]")
    if not 1 <= count <= MAX_COUNT:
        raise ValueError(f"count {count} is outside [1, {MAX_COUNT}]")
    return (term << COUNT_BITS) | count


def term_of(identity: int) -> Term:
    """The term in an id's high bits."""
    return Term(identity >> COUNT_BITS)


def short(identity: int) -> str:
    """An id for people: term.count."""
    return f"{identity >> COUNT_BITS}.{identity & MAX_COUNT}"
