"""The proof in its short form; `make prove` is the whole."""

from collections.abc import Callable

import broken
import pytest

from kvmesh.protocol.pairings import PairingBook
from simulator import small
from simulator.explore import Search, SmallWorld, queues_of
from simulator.mesh import MeshShape
from simulator.prove import SHORT, prove
from simulator.violation import Violation


@pytest.mark.timeout(120)
def test_the_short_proof_holds(capsys: pytest.CaptureFixture[str]) -> None:
    evidence = prove(SHORT)
    with capsys.disabled():
        print("\n" + "\n".join(evidence.lines()))
    assert evidence.holds, "\n".join(evidence.lines())
    assert len(evidence.faults) == 7, "every kind of fault happened"


@pytest.mark.parametrize("world", [small.pairing, small.whole, lambda: small.registration(2)])
def test_sleep_sets_leave_no_state_out(world: Callable[[], SmallWorld]) -> None:
    reduced, plain = Search(world()).run(), Search(world(), sleeping=False).run()
    assert (reduced.states, reduced.rests) == (plain.states, plain.rests)
    assert reduced.moves < plain.moves


def test_a_search_that_is_cut_short_is_not_complete() -> None:
    explored = Search(small.registration(2), max_states=100).run()
    assert not explored.complete


def test_a_search_finds_a_pairing_that_is_never_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PairingBook, "may_pair_again", lambda self, generation: False)
    with pytest.raises(Violation, match="0 pairs stand") as caught:
        Search(small.pairing()).run()
    (path,) = caught.value.__notes__
    assert "cut" in path


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("patches", "invariants"),
    [
        (broken.late_frames_written, (4, 6)),
        (broken.grant_not_waited_for, (4,)),
        (broken.let_go_in_the_step, (4,)),
        (broken.put_aside_and_dropped, (3, 6)),  # at rest the stuck room is seen wherever it is looked for first
    ],
)
def test_a_search_finds_pages_that_are_written_at_the_wrong_time_or_never(
    monkeypatch: pytest.MonkeyPatch, patches: Callable[[], list[broken.Patch]], invariants: tuple[int, ...]
) -> None:
    for owner, name, wrong in patches():
        monkeypatch.setattr(owner, name, wrong)
    with pytest.raises(Violation) as caught:
        Search(small.rooms(sharing=True, abort=1, crash=0)).run()
    assert caught.value.invariant in invariants


def test_a_process_and_its_replacement_are_told_apart() -> None:
    """Else a newcomer's first word, heard before its predecessor's end, would be a move that is never made."""
    state = small.mesh_of(MeshShape(pp=2, decoders=0, gateways=0))
    state.mesh.start_all()
    first = state.world.process("p0 rank 0")
    assert first is not None
    state.world.kill(first)
    state.mesh.start("p0 rank 0")
    names = [queue.name for queue in queues_of(state.world)]
    assert len([name for name in names if name.startswith("p0 rank 0")]) == 2
    assert len(set(names)) == len(names)
