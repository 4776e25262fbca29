"""The shape of a pipeline: a line of stages with equal pools, each reached where it said it is, none of them missing unseen."""

import pytest
from registry_mesh import Mesh

from kvmesh.errors import Unavailable
from kvmesh.protocol.directives import Grant, LinkNext, WholePipelines
from kvmesh.protocol.ids import Incarnation, PairingNumber, RoomId
from kvmesh.protocol.scheduler import Limits, Scheduler
from kvmesh.protocol.steps import AppliedLog


@pytest.mark.parametrize("pp_size", range(1, 9))
def test_step_streams_form_a_line_and_never_a_ring(pp_size: int) -> None:
    """F-P16, impossible: the last rank opens none, so no stage waits for a stage that waits for it."""
    mesh = Mesh()
    leases = {rank: mesh.stage("p0", rank, pp_size) for rank in reversed(range(pp_size))}
    rank_of = {mesh.incarnation[f"p0/{rank}"]: rank for rank in range(pp_size)}
    opened = [
        (rank, rank_of[said.next.incarnation])
        for rank, lease in leases.items()
        for said in mesh.said(lease)
        if isinstance(said, LinkNext)
    ]
    assert sorted(opened) == [(rank, rank + 1) for rank in range(pp_size - 1)]


def test_each_stage_is_dialled_at_the_address_it_gave_whichever_host_it_is_on() -> None:
    """F-N5: nobody derives an address from another's."""
    mesh = Mesh()
    decoder = mesh.decoder("d0")
    leases = {rank: mesh.stage("p0", rank, 3) for rank in (2, 1, 0)}
    for rank in (0, 1):
        (order,) = [said for said in mesh.said(leases[rank]) if isinstance(said, LinkNext)]
        assert order.next.address == f"p0/{rank + 1}:1"
    (whole,) = [said for said in mesh.said(decoder) if isinstance(said, WholePipelines)][-1].pipelines
    assert [stage.address for stage in whole.stages] == ["p0/0:1", "p0/1:1", "p0/2:1"]


def test_the_first_request_is_answered_in_time_while_a_stage_was_never_started_and_that_stage_is_named() -> None:
    """F-P15: there is no warm-up of its own that could hang."""
    mesh = Mesh()
    mesh.decoder("d0")
    mesh.stage("p0", rank=0, pp_size=2)
    waiting = mesh.stage("p1", rank=0, pp_size=2)
    mesh.stage("p1", rank=1, pp_size=2)
    mesh.hear(mesh.registry.lease_lost(waiting))
    for name in ("d0", "p0/0", "p1/1"):
        mesh.beat(name)
    first = mesh.ask(hold_seconds=1.0)
    assert mesh.answer(first) is None
    mesh.pass_time(1.0)
    denied = mesh.answer(first)
    assert isinstance(denied, Unavailable)
    assert denied.reason == "no_pair"
    waits = [seat.waits_for for pipeline in mesh.registry.view(mesh.now).pipelines for seat in pipeline.seats]
    assert waits == ["rank 1 of p0", "", "", ""]


def test_a_pipeline_serves_while_another_waits_for_a_stage() -> None:
    """F-P15: two replicas, one of them not whole."""
    mesh = Mesh()
    mesh.decoder("d0")
    mesh.stage("p0", rank=0, pp_size=2)
    for rank in (1, 0):
        mesh.stage("p1", rank, pp_size=2)
    mesh.beat("d0")
    answer = mesh.answer(mesh.ask())
    assert isinstance(answer, Grant)
    assert answer.pipeline == "p1"


def test_what_rank_0_admits_into_the_last_page_every_stage_can_hold() -> None:
    """F-P7, impossible: a stage holds what the log says and nothing else, in a pool of the size that rank 0 counts with."""
    key = (Incarnation(1), PairingNumber(1))
    limits = Limits(
        num_pages=8,
        page_size=4,
        max_prompt_len=32,
        step_tokens=64,
        max_steps_in_flight=3,
        max_waiting_rooms=9,
        max_steps_ahead=3,
    )
    head, stages = Scheduler(limits), [AppliedLog(8, 4), AppliedLog(8, 4)]
    head.pair(key)
    for room, prompt_len in ((1, 12), (2, 1), (3, 16)):
        head.admit(key, RoomId(room), prompt_len=prompt_len, cached_len=0)
    while (step := head.next_step()) is not None:
        for stage in stages:
            stage.apply(step)
    assert head.free_pages == 0
    assert [stage.free_pages for stage in stages] == [0, 0]
