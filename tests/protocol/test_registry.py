"""Leases, fit, terms and the picture, as the registry's core keeps them."""

import pytest
from registry_mesh import Mesh, paired

from kvmesh.errors import Fenced, InvalidInput, Misfit, Unavailable
from kvmesh.protocol.directives import (
    Admitted,
    DecoderAdmitted,
    Superseded,
    WaitFor,
    WholePipelines,
)
from kvmesh.protocol.ids import Generation, Incarnation, Term, compose, term_of
from kvmesh.protocol.members import Load, Member
from kvmesh.protocol.picture import MeshLimits
from kvmesh.protocol.seats import SeatState

# Leases.


def test_who_waits_is_told_when_it_changes_and_only_then() -> None:
    mesh = Mesh()
    lease = mesh.stage("p0", rank=0, pp_size=3)
    mesh.beat("p0/0", waiting_rooms=1)
    mesh.stage("p0", rank=1, pp_size=3)
    mesh.stage("p0", rank=2, pp_size=3)
    assert [said.peer for said in mesh.said(lease) if isinstance(said, WaitFor)] == [
        "rank 1 of p0",
        "rank 1 of p0, which waits for rank 2",
        "rank 1 of p0",
    ]


def test_decoders_are_told_which_pipelines_are_whole_at_once_and_after_each_change() -> None:
    mesh = Mesh()
    lease = mesh.decoder("d0")
    assert mesh.said(lease) == [DecoderAdmitted(), WholePipelines(())]
    mesh.stage("p1")
    mesh.stage("p0")
    mesh.beat("p0/0", waiting_rooms=1)
    mesh.hear(mesh.registry.lease_lost(mesh.lease["p1/0"]))
    lists = [said for said in mesh.said(lease) if isinstance(said, WholePipelines)]
    assert [[whole.pipeline for whole in told.pipelines] for told in lists] == [[], ["p1"], ["p0", "p1"], ["p0"]]
    (whole,) = lists[-1].pipelines
    assert whole.stages == (Member(Incarnation(mesh.incarnation["p0/0"]), "p0/0:1"),)


def test_a_silent_member_loses_its_lease_and_its_pipeline_its_rooms() -> None:
    mesh = paired()
    for now in (0.5, 1.0, 1.5, 2.0, 2.5):
        mesh.pass_time(now)
        mesh.beat("d0")
    refused = mesh.refused(mesh.lease["p0/0"])
    assert refused is not None
    assert refused.reason == "lease_expired"
    assert mesh.refused(mesh.lease["d0"]) is None
    assert mesh.answer(mesh.ask()) is None
    assert not mesh.registry.mesh.rosters, "a pipeline that everyone left is forgotten"


def test_a_registry_that_was_late_itself_starts_every_lease_anew() -> None:
    mesh = paired()
    mesh.pass_time(1.0)
    mesh.now = 61.0
    mesh.hear(mesh.registry.tick(61.0))
    assert mesh.granted()
    mesh.pass_time(62.9)
    assert mesh.refused(mesh.lease["p0/0"]) is None
    mesh.pass_time(63.5)
    assert mesh.refused(mesh.lease["p0/0"]) is not None


def test_a_newer_stream_of_a_member_takes_the_place_of_the_older() -> None:
    mesh = paired()
    older = mesh.lease["d0"]
    mesh.decoder("d0")
    refused = mesh.refused(older)
    assert refused is not None
    assert refused.reason == "lease_replaced"
    assert mesh.registry.lease_lost(older) == [], "its end is late"
    assert [len(mesh.registry.view(0.0).decoders), len(mesh.registry.mesh.leases.all())] == [1, 2]


def test_what_comes_over_a_lease_that_is_over_changes_nothing() -> None:
    mesh = paired()
    lease = mesh.lease["p0/0"]
    mesh.hear(mesh.registry.lease_lost(lease))
    version = mesh.registry.version
    assert mesh.registry.heartbeat(lease, Load(), 0.0) == []
    assert mesh.registry.linked(lease, Generation(1), 0.0) == []
    assert mesh.registry.lease_lost(lease) == []
    mesh.registry.heard(lease, 0.0)
    assert mesh.registry.version == version


def test_linked_from_a_decoder_changes_nothing() -> None:
    mesh = paired()
    assert mesh.registry.linked(mesh.lease["d0"], Generation(1), 0.0) == []


# Fit.


@pytest.mark.parametrize(("field", "value"), [("model_fingerprint", "g"), ("num_layers", 13), ("vocab_size", 321)])
def test_members_serve_one_model(field: str, value: object) -> None:
    mesh = Mesh()
    mesh.stage("p0")
    refused = mesh.refused(mesh.decoder("d0", **{field: value, "layer_end": 13 if field == "num_layers" else 12}))
    assert isinstance(refused, Misfit)
    assert f"{field}: decoder {mesh.incarnation['d0']:016x} has {value}, rank 0 of p0 has" in refused.message
    assert not mesh.registry.view(0.0).decoders
    assert len(mesh.registry.mesh.leases.all()) == 1


def test_a_stage_is_compared_with_its_own_pipeline_first() -> None:
    mesh = Mesh()
    mesh.decoder("d0")
    mesh.stage("a0")
    mesh.stage("p0", rank=1, pp_size=2)
    refused = mesh.refused(mesh.stage("p0", rank=0, pp_size=2, model_fingerprint="g"))
    assert isinstance(refused, Misfit)
    assert refused.message == "model_fingerprint: rank 0 of p0 has g, rank 1 of p0 has f"


def test_pipelines_and_decoders_may_differ_in_pools_and_dtype() -> None:
    mesh = Mesh()
    mesh.stage("p0")
    mesh.stage("p1", num_pages=32)
    mesh.decoder("d0", page_size=8, num_pages=999, dtype="bf16")
    mesh.beat("d0")
    assert mesh.granted()


def test_a_misfit_changes_nothing_not_even_who_is_known() -> None:
    mesh = Mesh()
    mesh.stage("p0")
    version = mesh.registry.version
    mesh.stage("p1", model_fingerprint="g")
    assert list(mesh.registry.mesh.rosters) == ["p0"]
    assert mesh.registry.version == version


def test_one_incarnation_is_one_member() -> None:
    mesh = Mesh()
    mesh.stage("p0")
    mesh.incarnation["d0"] = mesh.incarnation["p0/0"]
    refused = mesh.refused(mesh.decoder("d0"))
    assert isinstance(refused, InvalidInput)
    assert refused.field == "member.incarnation"


def test_another_model_may_come_when_everyone_has_left() -> None:
    mesh = paired()
    for name in ("p0/0", "d0"):
        mesh.hear(mesh.registry.lease_lost(mesh.lease[name]))
    lease = mesh.stage("p0", pp_size=1, model_fingerprint="g")
    assert Admitted(Generation(compose(Term(3), 2))) in mesh.said(lease)


# Terms.


def test_a_restarted_registry_seats_what_runs_and_rooms_go_on() -> None:
    """F-D15"""
    mesh = Mesh()
    generation = Generation(compose(Term(2), 9))
    for rank in (0, 1):
        mesh.stage("p0", rank=rank, pp_size=2, highest_term=Term(2), held_generation=generation)
    mesh.decoder("d0")
    mesh.beat("d0")
    granted = mesh.granted()
    assert granted.generation == generation
    assert term_of(granted.room) == 3


@pytest.mark.parametrize(
    "told", [{"highest_term": Term(4)}, {"held_generation": Generation(compose(Term(4), 1))}], ids=["seen", "held"]
)
def test_a_registry_that_hears_of_a_higher_term_refuses_everyone_and_ends(told: dict[str, object]) -> None:
    mesh = paired()
    mesh.decoder("d1")
    mesh.beat("d0", draining=True)
    held = mesh.ask()
    lease = mesh.stage("p1", **told)
    refused = mesh.refused(lease)
    assert isinstance(refused, Fenced)
    assert refused.reason == "stale_term"
    assert mesh.actions[-1] == Superseded(Term(4))
    for name in ("p0/0", "d0", "d1"):
        assert isinstance(mesh.refused(mesh.lease[name]), Unavailable)
    assert isinstance(mesh.answer(held), Unavailable)
    assert isinstance(mesh.answer(mesh.ask()), Unavailable), "from now on, too"
    assert isinstance(mesh.refused(mesh.stage("p0")), Unavailable)
    assert mesh.registry.tick(100.0) == []


# The picture.


def test_the_picture_shows_seats_orders_loads_and_ages() -> None:
    mesh = Mesh()
    mesh.stage("p1", rank=1, pp_size=2)
    mesh.stage("p0")
    mesh.decoder("d0")
    mesh.beat("d0", running_rooms=3)
    picture = mesh.registry.view(now=0.25)
    assert [(p.name, p.generation != 0) for p in picture.pipelines] == [("p0", True), ("p1", False)]
    assert [seat.state for seat in picture.pipelines[1].seats] == [SeatState.EMPTY, SeatState.ADMITTED]
    assert [seat.admitted_order for p in picture.pipelines for seat in p.seats] == [2, 0, 1]
    assert picture.decoders[0].load.running_rooms == 3
    assert picture.decoders[0].heartbeat_age_seconds == 0.25
    mesh.granted()
    assert mesh.registry.view(0.0).decoders[0].load.running_rooms == 3, "as told, not as expected"
    assert mesh.registry.view(0.0).rooms_minted == 1


def test_the_version_rises_with_every_change_and_not_with_signs_of_life() -> None:
    mesh = paired()
    version = mesh.registry.version
    mesh.beat("d0")
    mesh.pass_time(1.0)
    assert mesh.registry.version == version
    mesh.beat("d0", running_rooms=1)
    assert mesh.registry.version > version


def test_limits_are_the_smallest_of_all_members() -> None:
    """F-C8, F-M8"""
    mesh = Mesh()
    assert mesh.registry.view(0.0).limits == MeshLimits()
    mesh.stage("p0", num_pages=8)
    mesh.decoder("d0", max_tokens=300)
    assert mesh.registry.view(0.0).limits == MeshLimits(300, 128, "m", "f")
    mesh.decoder("d1", num_pages=4)
    assert mesh.registry.view(0.0).limits == MeshLimits(64, 63, "m", "f"), "a decoder's pool bounds prompt plus output"
