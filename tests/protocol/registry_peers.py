"""What the tests of the registry's core share: descriptors, and what must hold in a pipeline after every event."""

from itertools import pairwise

from kvmesh.protocol.descriptors import Descriptor
from kvmesh.protocol.roster import Roster
from kvmesh.protocol.seats import SeatState
from kvmesh.protocol.version import PROTOCOL_VERSION

LAYERS = 12


def descriptor(rank: int = 0, pp_size: int = 1, **changes: object) -> Descriptor:
    """Of a stage that holds its share of twelve layers; of a decoder, with the defaults."""
    values: dict[str, object] = {
        "protocol_version": PROTOCOL_VERSION,
        "model_name": "m",
        "model_fingerprint": "f",
        "dtype": "fp32",
        "num_layers": LAYERS,
        "num_kv_heads": 2,
        "head_dim": 8,
        "page_size": 16,
        "num_pages": 64,
        "max_tokens": 512,
        "layer_begin": rank * LAYERS // pp_size,
        "layer_end": (rank + 1) * LAYERS // pp_size,
        "vocab_size": 320,
    }
    return Descriptor(**(values | changes))  # type: ignore[arg-type]


def check_roster(roster: Roster) -> None:
    """What holds in a pipeline after every event."""
    for seat in roster.seats:
        assert (seat.holder is None) is (seat.state is SeatState.EMPTY)
        assert (seat.generation == 0) is (seat.state in (SeatState.EMPTY, SeatState.WAITING))
        assert (seat.admitted_order > 0) is (seat.state is SeatState.ADMITTED)
    for seat, behind in pairwise(roster.seats):
        if seat.state is SeatState.LINKING or seat.holds(roster.forming):
            assert seat.generation == roster.forming
            assert behind.holds(roster.forming), f"rank {seat.rank} goes before rank {behind.rank}"
        if seat.holds(roster.forming):
            assert behind.admitted_order < seat.admitted_order
    assert not roster.forming or roster.seats[-1].holds(roster.forming)
    assert not roster.seats[0].holds(roster.forming), "whole is no longer forming"
    assert all(roster.seats[n.rank].holder is not None for n in roster.newcomers), "nobody waits for an empty seat"
    incarnations = [stage.member.incarnation for stage in roster.stages]
    assert len(set(incarnations)) == len(incarnations)
