"""Rooms, as the registry's core gives them out."""

import pytest
from registry_mesh import Mesh, paired

from kvmesh.errors import Full, InvalidInput, Unavailable, UnknownModel
from kvmesh.protocol.directives import (
    Grant,
)
from kvmesh.protocol.ids import Generation, Term, compose, term_of
from kvmesh.protocol.placement import RoomRequest


def test_a_room_carries_the_term_and_is_never_minted_twice() -> None:
    """F-R7, F-R8"""
    mesh = paired()
    rooms = []
    for _ in range(50):
        rooms.append(mesh.granted().room)
        mesh.beat("d0", running_rooms=len(rooms))
    assert len(set(rooms)) == 50
    assert {term_of(room) for room in rooms} == {3}
    assert all(0 < room < 1 << 63 for room in rooms)


def test_a_room_needs_a_whole_pipeline_and_a_decoder_paired_with_that_generation() -> None:
    mesh = Mesh()
    held = mesh.ask()
    mesh.stage("p0", rank=1, pp_size=2)
    mesh.decoder("d0")
    mesh.beat("d0", paired_generations=(Generation(compose(Term(3), 1)),))
    assert mesh.answer(held) is None, "F-N2: paired with half a pipeline"
    mesh.stage("p0", rank=0, pp_size=2)
    answer = mesh.answer(held)
    assert isinstance(answer, Grant)
    assert (answer.pipeline, answer.decoder.address) == ("p0", "d0:1")


def test_a_pairing_with_an_earlier_generation_is_no_pair() -> None:
    mesh = paired()
    mesh.stage("p0")  # begins anew
    held = mesh.ask()
    assert mesh.answer(held) is None
    mesh.beat("d0")
    answer = mesh.answer(held)
    assert isinstance(answer, Grant)
    assert answer.generation == compose(Term(3), 2)


def test_held_calls_are_answered_first_come_first_served() -> None:
    mesh = Mesh()
    asked = [mesh.ask() for _ in range(3)]
    assert mesh.registry.num_held == 3
    mesh.stage("p0")
    mesh.decoder("d0")
    mesh.beat("d0")
    answers = [mesh.answer(request) for request in asked]
    rooms = [answer.room for answer in answers if isinstance(answer, Grant)]
    assert len(rooms) == 3
    assert rooms == sorted(rooms)
    assert mesh.registry.num_held == 0


def test_a_call_is_held_for_its_time_and_then_told_when_to_come_back() -> None:
    """F-T1, F-T7"""
    mesh = Mesh()
    held = mesh.ask(hold_seconds=5.0)
    mesh.pass_time(4.99)
    assert mesh.answer(held) is None
    mesh.pass_time(5.0)
    answer = mesh.answer(held)
    assert isinstance(answer, Unavailable)
    assert (answer.reason, answer.retry_after_seconds) == ("no_pair", 0.5)


def test_no_more_calls_are_held_than_the_limit_and_the_next_is_told_when_to_come_back() -> None:
    """F-K1"""
    mesh = Mesh()
    limit = mesh.registry.limits.max_waiting_rooms
    held = [mesh.ask() for _ in range(limit)]
    answer = mesh.answer(mesh.ask())
    assert isinstance(answer, Full)
    assert answer.retry_after_seconds
    assert mesh.registry.num_held == limit
    assert all(mesh.answer(request) is None for request in held)


def test_a_call_without_time_is_not_held() -> None:
    mesh = Mesh()
    assert isinstance(mesh.answer(mesh.ask(hold_seconds=0.0)), Unavailable)


def test_a_caller_that_left_gets_no_room() -> None:
    mesh = Mesh()
    request = mesh.ask()
    mesh.registry.forget(request)
    mesh.stage("p0")
    mesh.decoder("d0")
    mesh.beat("d0")
    assert mesh.answer(request) is None
    assert mesh.registry.view(0.0).rooms_minted == 0


@pytest.mark.parametrize("draining", ["p0/0", "d0"])
def test_a_member_that_drains_gets_no_room(draining: str) -> None:
    """F-D14"""
    mesh = paired()
    mesh.beat(draining, draining=True)
    assert mesh.answer(mesh.ask()) is None


def test_any_stage_that_drains_takes_its_pipeline_out_of_placement() -> None:
    mesh = Mesh()
    for rank in (1, 0):
        mesh.stage("p0", rank=rank, pp_size=2)
    mesh.decoder("d0")
    mesh.beat("d0")
    mesh.beat("p0/1", draining=True)
    assert mesh.answer(mesh.ask()) is None


def test_full_queues_are_refused_at_once() -> None:
    mesh = paired()
    mesh.beat("d0", waiting_rooms=4)
    assert isinstance(mesh.answer(mesh.ask()), Full)


def test_a_heartbeat_takes_the_place_of_what_was_expected() -> None:
    mesh = paired()
    mesh.beat("d0", free_pages=1)
    for _ in range(4):
        mesh.granted()
    assert isinstance(mesh.answer(mesh.ask()), Full)
    mesh.beat("d0", free_pages=1)
    assert mesh.granted()


def test_another_model_is_unknown_once_somebody_serves_one() -> None:
    mesh = Mesh()
    early = mesh.ask(RoomRequest("other", 1, 1))
    assert mesh.answer(early) is None, "whoever comes may serve it"
    mesh.stage("p0")
    assert isinstance(mesh.answer(early), UnknownModel)
    answer = mesh.answer(mesh.ask(RoomRequest("other", 1, 1)))
    assert isinstance(answer, UnknownModel)
    assert "'m' is" in answer.message


@pytest.mark.parametrize("field", ["prompt_len", "max_output_len"])
def test_a_room_of_no_tokens_is_refused(field: str) -> None:
    values = {"prompt_len": 1, "max_output_len": 1, field: 0}
    mesh = Mesh()
    answer = mesh.answer(mesh.ask(RoomRequest("", **values)))
    assert isinstance(answer, InvalidInput)
    assert answer.field == field
