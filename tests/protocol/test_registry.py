from itertools import count

import pytest

from kvmesh.errors import Full, Misfit, UnknownModel
from kvmesh.protocol.descriptors import Descriptor
from kvmesh.protocol.ids import Generation, Incarnation, LeaseId, Rank, Term, term_of
from kvmesh.protocol.placement import Load
from kvmesh.protocol.registry import DecoderRegistrant, Registry
from kvmesh.protocol.roster import Ask, Registrant

BASE = Descriptor(1, "m", "f", 1, 12, 2, 8, 16, 64, 512, 0, 12, 320)


class Mesh:
    """A registry, pipelines of one stage and decoders."""

    def __init__(self, **settings: float) -> None:
        values = {"lease_seconds": 2.0, "heartbeat_seconds": 0.5, "max_waiting_rooms": 4} | settings
        self.registry = Registry(Term(3), **values)  # type: ignore[arg-type]
        self._leases = count(1)
        self.lease: dict[str, LeaseId] = {}
        self.generation: dict[str, Generation] = {}

    def pipeline(self, name: str, now: float = 0.0, **changes: object) -> None:
        self.lease[name] = lease = LeaseId(next(self._leases))
        stage = Registrant(lease, Incarnation(lease + 100), "a:1", Rank(0), 1, _changed(changes))
        for said in self.registry.register_stage(name, stage, now):
            if said.ask is Ask.ADMIT:
                self.generation[name] = said.generation

    def decoder(self, name: str, now: float = 0.0, **changes: object) -> None:
        self.lease[name] = lease = LeaseId(next(self._leases))
        decoder = DecoderRegistrant(lease, Incarnation(lease + 100), f"{name}:1", _changed(changes))
        self.registry.register_decoder(decoder, now)
        self.beat(name, now)

    def beat(self, name: str, now: float = 0.0, **load: object) -> None:
        paired = tuple(self.generation.values())
        self.registry.beat(self.lease[name], Load(**({"paired_generations": paired} | load)), now)  # type: ignore[arg-type]

    def place(self, prompt_len: int = 10) -> tuple[str, str]:
        placed = self.registry.assign("", prompt_len)
        assert placed is not None
        return placed.pair.pipeline, placed.decoder.address.partition(":")[0]


def _changed(changes: dict[str, object]) -> Descriptor:
    values = {name: getattr(BASE, name) for name in BASE.__slots__}
    return Descriptor(**(values | changes))


def test_a_room_carries_the_term_and_is_never_minted_twice() -> None:
    mesh = Mesh()
    mesh.pipeline("p0")
    mesh.decoder("d0")
    rooms = [placed.room for _ in range(50) if (placed := mesh.registry.assign("m", 1)) is not None]
    assert len(set(rooms)) == 50
    assert {term_of(room) for room in rooms} == {3}


def test_a_room_needs_a_whole_pipeline_and_a_decoder_paired_with_that_generation() -> None:
    mesh = Mesh()
    assert mesh.registry.assign("", 1) is None
    mesh.pipeline("p0")
    assert mesh.registry.assign("", 1) is None
    mesh.decoder("d0")
    mesh.beat("d0", paired_generations=(Generation(99),))
    assert mesh.registry.assign("", 1) is None
    mesh.beat("d0")
    assert mesh.place() == ("p0", "d0")


def test_the_least_loaded_pair_is_taken() -> None:
    mesh = Mesh()
    for name in ("p0", "p1"):
        mesh.pipeline(name)
    for name in ("d0", "d1"):
        mesh.decoder(name)
    mesh.beat("p0", queued_tokens=500)
    mesh.beat("d0", running_rooms=3)
    assert mesh.place() == ("p1", "d1")
    mesh.beat("p1", queued_tokens=900)
    mesh.beat("d1", waiting_rooms=1)
    assert mesh.place() == ("p0", "d0")


def test_rooms_placed_since_the_last_heartbeat_count_as_load() -> None:
    """F-T6: a burst between two heartbeats is spread."""
    mesh = Mesh()
    mesh.pipeline("p0")
    mesh.pipeline("p1")
    mesh.decoder("d0")
    placed = [mesh.place(100)[0] for _ in range(10)]
    assert placed.count("p0") == placed.count("p1") == 5


@pytest.mark.parametrize("draining", ["p0", "d0"])
def test_a_member_that_drains_gets_no_room(draining: str) -> None:
    """F-D14"""
    mesh = Mesh()
    mesh.pipeline("p0")
    mesh.decoder("d0")
    mesh.beat(draining, draining=True)
    assert mesh.registry.assign("", 1) is None


def test_full_queues_are_refused_with_a_time_to_come_back() -> None:
    """F-K1, F-T2"""
    mesh = Mesh()
    mesh.pipeline("p0")
    mesh.decoder("d0")
    mesh.beat("d0", waiting_rooms=4)
    with pytest.raises(Full) as caught:
        mesh.registry.assign("", 1)
    assert caught.value.retry_after_seconds


def test_another_model_is_unknown() -> None:
    mesh = Mesh()
    mesh.pipeline("p0")
    with pytest.raises(UnknownModel, match="'m' is"):
        mesh.registry.assign("other", 1)


@pytest.mark.parametrize(("field", "value"), [("model_fingerprint", "g"), ("num_layers", 13), ("vocab_size", 321)])
def test_members_serve_one_model(field: str, value: object) -> None:
    mesh = Mesh()
    mesh.pipeline("p0")
    with pytest.raises(Misfit, match=f"{field}: the decoder has {value}, rank 0 of p0 has"):
        mesh.decoder("d0", **{field: value})
    assert not mesh.registry.decoders


def test_pools_and_dtype_of_a_decoder_may_differ_from_the_pipelines() -> None:
    mesh = Mesh()
    mesh.pipeline("p0")
    mesh.decoder("d0", page_size=8, num_pages=999, dtype=2)
    assert mesh.place() == ("p0", "d0")


def test_a_silent_member_loses_its_lease() -> None:
    mesh = Mesh()
    mesh.pipeline("p0", now=0.0)
    mesh.decoder("d0", now=0.0)
    for now in (0.0, 0.5, 1.0, 1.5, 2.0):
        mesh.beat("d0", now=now)
        assert mesh.registry.tick(now) == []
    assert mesh.registry.tick(2.5) == [mesh.lease["p0"]]
    mesh.registry.lease_lost(mesh.lease["p0"])
    assert mesh.registry.assign("", 1) is None


def test_a_registry_that_was_late_itself_starts_every_lease_anew() -> None:
    mesh = Mesh()
    mesh.pipeline("p0", now=0.0)
    mesh.registry.tick(0.0)
    assert mesh.registry.tick(60.0) == []
    assert mesh.registry.tick(60.5) == []
    assert mesh.registry.tick(61.0) == []
    assert mesh.registry.tick(61.5) == []
    assert mesh.registry.tick(62.0) == []
    assert mesh.registry.tick(62.5) == [mesh.lease["p0"]]


def test_a_heartbeat_of_a_lease_that_is_over_is_absorbed() -> None:
    mesh = Mesh()
    mesh.decoder("d0")
    mesh.registry.lease_lost(mesh.lease["d0"])
    mesh.beat("d0")
    mesh.registry.lease_lost(mesh.lease["d0"])
    assert not mesh.registry.decoders


def test_limits_are_the_smallest_of_the_members() -> None:
    """F-C8, F-M8"""
    mesh = Mesh()
    assert mesh.registry.limits.max_tokens == 0
    mesh.pipeline("p0", num_pages=8)
    mesh.decoder("d0", max_tokens=300)
    limits = mesh.registry.limits
    assert limits.max_prompt_tokens == 128
    assert limits.max_tokens == 300
    assert limits.model_name == "m"


def test_a_pipeline_that_everyone_left_is_forgotten() -> None:
    mesh = Mesh()
    mesh.pipeline("p0")
    mesh.registry.lease_lost(mesh.lease["p0"])
    assert not mesh.registry.rosters
