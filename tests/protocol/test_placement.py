from dataclasses import replace

import pytest
from registry_peers import descriptor

from kvmesh.errors import Full, InvalidInput
from kvmesh.protocol.ids import Generation, Incarnation, LeaseId, Rank
from kvmesh.protocol.leases import Lease
from kvmesh.protocol.members import Decoder, Load, Member, Stage
from kvmesh.protocol.placement import Pair, RoomRequest, least_loaded

ROOM = RoomRequest("", 30, 20)
"""Two pages at the pipeline, four at the decoder."""


def head(name: str, load: Load | None = None, **changes: object) -> Lease:
    stage = Stage(LeaseId(1), Member(Incarnation(1), "a:1"), name, Rank(0), 1, descriptor(**changes))
    return leased(stage, load)


def decoder(incarnation: int, load: Load | None = None, **changes: object) -> Lease:
    return leased(Decoder(LeaseId(2), Member(Incarnation(incarnation), "b:1"), descriptor(**changes)), load)


def leased(member: Stage | Decoder, load: Load | None) -> Lease:
    told = load or Load(free_pages=member.descriptor.num_pages)
    return Lease(member, 0.0, told, told)


def pairs(heads: list[Lease], decoders: list[Lease]) -> list[Pair]:
    return [Pair(h.member.pipeline, Generation(1), h, d) for h in heads for d in decoders]  # type: ignore[union-attr]


def chosen(standing: list[Pair], room: RoomRequest = ROOM, limit: int = 4) -> tuple[str, int]:
    pair = least_loaded(standing, room, limit, 0.5)
    pair.place(room)
    return pair.pipeline, pair.decoder.member.member.incarnation


def test_of_equal_pairs_the_first_is_taken() -> None:
    assert chosen(pairs([head("p0"), head("p1")], [decoder(7), decoder(8)])) == ("p0", 7)


def test_rooms_that_wait_count_before_everything_else() -> None:
    busy, queue = Load(free_pages=9, queued_tokens=999), Load(free_pages=64, waiting_rooms=1)
    assert chosen(pairs([head("p0", queue), head("p1", busy)], [decoder(7)])) == ("p1", 7)


def test_whoever_lost_a_room_of_the_request_comes_after_all_others() -> None:
    """A retry does not go straight back to what has just died, while there is another."""
    busy = Load(waiting_rooms=1)
    standing = pairs([head("p1"), head("p2", busy)], [decoder(7), decoder(8, busy)])
    assert chosen(standing, replace(ROOM, lost_decoders=(Incarnation(7),)))[1] == 8
    lost = replace(ROOM, lost_generations=(Generation(1),), lost_decoders=(Incarnation(7),))
    assert chosen(standing, lost)[1] == 8
    assert chosen(standing[:1], lost) == ("p1", 7), "where there is no other, it is tried again"


def test_then_prompt_tokens_to_compute_then_free_pages() -> None:
    heads = [head("p0", Load(free_pages=64, queued_tokens=10)), head("p1", Load(free_pages=64))]
    assert chosen(pairs(heads, [decoder(7, Load(free_pages=20)), decoder(8, Load(free_pages=21))])) == ("p1", 8)


def test_a_pair_without_the_pages_now_would_let_the_room_wait_and_comes_last() -> None:
    full, tight = Load(free_pages=3), Load(free_pages=4, running_rooms=9)
    assert chosen(pairs([head("p0")], [decoder(7, full), decoder(8, tight)])) == ("p0", 8)


def test_a_burst_between_two_heartbeats_is_spread() -> None:
    """F-T6"""
    standing = pairs([head("p0"), head("p1")], [decoder(7), decoder(8)])
    placed = [chosen(standing) for _ in range(20)]
    assert [sum(p == name for p, _ in placed) for name in ("p0", "p1")] == [10, 10]
    assert [sum(d == number for _, d in placed) for number in (7, 8)] == [10, 10]


def test_what_was_placed_waits_once_the_pages_are_gone_and_then_the_pair_is_full() -> None:
    """F-K1, F-T2: refused before any work is spent, with a time to come back."""
    standing = pairs([head("p0")], [decoder(7, Load(free_pages=8))])
    for _ in range(2 + 4):
        chosen(standing)
    assert standing[0].decoder.expected == Load(running_rooms=2, waiting_rooms=4)
    with pytest.raises(Full) as caught:
        chosen(standing)
    assert caught.value.retry_after_seconds == 0.5


@pytest.mark.parametrize("where", ["head", "decoder"])
def test_a_pair_is_full_when_either_queue_is_at_the_limit(where: str) -> None:
    full = Load(free_pages=64, waiting_rooms=4)
    heads = [head("p0", full if where == "head" else None), head("p1", full if where == "head" else None)]
    decoders = [decoder(7, full if where == "decoder" else None)]
    with pytest.raises(Full, match="4 rooms wait"):
        chosen(pairs(heads, decoders))
    assert chosen(pairs([*heads, head("p2")], [*decoders, decoder(8)]))[1] == (7 if where == "head" else 8)


@pytest.mark.parametrize(
    ("room", "field", "limit"),
    [
        (RoomRequest("", 512, 1), "prompt_len", "511"),
        (RoomRequest("", 500, 13), "max_output_len", "512"),
    ],
)
def test_what_no_pair_could_hold_when_idle_is_refused_for_good(room: RoomRequest, field: str, limit: str) -> None:
    """F-C8"""
    with pytest.raises(InvalidInput, match=f"the limit (is|of both is) {limit}") as caught:
        chosen(pairs([head("p0")], [decoder(7)]), room)
    assert caught.value.field == field


def test_pools_that_are_smaller_than_the_token_limit_bound_what_is_placed_there() -> None:
    small = pairs([head("p0", num_pages=2)], [decoder(7)])
    with pytest.raises(InvalidInput, match="33 prompt tokens; the limit is 32"):
        chosen(small, RoomRequest("", 33, 1))
    assert chosen([*small, *pairs([head("p1")], [decoder(8, num_pages=4)])], RoomRequest("", 33, 1)) == ("p1", 8)
    with pytest.raises(InvalidInput, match="the limit of both is 64"):
        chosen(pairs([head("p1")], [decoder(8, num_pages=4)]), RoomRequest("", 33, 32))
