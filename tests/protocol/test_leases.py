from registry_peers import descriptor

from kvmesh.protocol.ids import Incarnation, LeaseId
from kvmesh.protocol.leases import Leases
from kvmesh.protocol.members import Decoder, Load, Member


def opened(*leases: int) -> Leases:
    made = Leases(lease_seconds=2.0, heartbeat_seconds=0.5, now=0.0)
    for lease in leases:
        made.open(Decoder(LeaseId(lease), Member(Incarnation(lease), "d:1"), descriptor()), 0.0)
    return made


def run(leases: Leases, until: float, heard: tuple[int, ...] = ()) -> list[tuple[float, int]]:
    """Ticks whenever due; (when, which) of those that expired."""
    expired = []
    while (now := leases.due) <= until:
        for lease in heard:
            leases.heard(LeaseId(lease), now)
        for lost in leases.expired(now):
            leases.end(lost.member.lease)
            expired.append((now, lost.member.lease))
    return expired


def test_who_is_silent_for_the_lease_time_is_lost_and_nobody_else() -> None:
    assert run(opened(1, 2), until=4.0, heard=(2,)) == [(2.25, 1)]


def test_any_message_keeps_a_lease() -> None:
    assert run(opened(1), until=60.0, heard=(1,)) == []


def test_it_wants_to_be_called_twice_in_a_heartbeat() -> None:
    leases = opened()
    leases.expired(0.0)
    assert leases.due == 0.25


def test_a_registry_that_was_late_by_a_heartbeat_starts_every_lease_anew() -> None:
    """It was stopped for a minute and knows nothing of the others' silence."""
    leases = opened(1, 2)
    leases.expired(0.0)
    assert leases.expired(60.0) == []
    assert run(leases, until=70.0, heard=(2,)) == [(62.25, 1)]


def test_one_that_was_late_by_less_does_not() -> None:
    leases = opened(1)
    leases.expired(0.0)
    for now in (0.7, 1.4, 2.1):
        lost = leases.expired(now)
    assert [lease.member.lease for lease in lost] == [1]


def test_a_member_counts_as_idle_until_its_first_heartbeat() -> None:
    lease = opened(1).get(LeaseId(1))
    assert lease is not None
    assert lease.load == Load(free_pages=64)


def test_what_comes_after_the_end_finds_no_lease() -> None:
    leases = opened(1)
    assert leases.end(LeaseId(1)) is not None
    assert leases.end(LeaseId(1)) is None
    assert leases.heard(LeaseId(1), 1.0) is None
