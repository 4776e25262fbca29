"""A request over its attempts: tokens once and in order, and when another room is worth trying."""

import pytest

from kvmesh.errors import Fault, InvalidInput, Unavailable
from kvmesh.protocol.ids import Generation, Incarnation
from kvmesh.protocol.request import LOST_STEP, Request


def request(length: int = 4, attempts: int = 3) -> Request:
    return Request(length, attempts)


def begin(own: Request) -> None:
    own.begin_attempt(Generation(1), Incarnation(2))


def test_tokens_come_as_what_is_next_and_the_last_ends_it() -> None:
    own = request()
    own.take(0, [7], last=False)
    own.take(1, [8, 9], last=False)
    assert (own.output, own.left, own.finished) == ([7, 8, 9], 1, False)
    own.take(3, [1], last=False)
    assert own.finished, "as many as were asked for"


@pytest.mark.parametrize(("index", "tokens"), [(0, [7]), (2, [7]), (1, []), (1, [1, 2, 3, 4])])
def test_a_token_twice_missing_or_too_many_is_a_fault_and_changes_nothing(index: int, tokens: list[int]) -> None:
    own = request()
    own.take(0, [5], last=False)
    with pytest.raises(Fault):
        own.take(index, tokens, last=False)
    assert own.output == [5]


def test_nothing_comes_after_the_last_token() -> None:
    own = request()
    own.take(0, [5], last=True)
    with pytest.raises(Fault):
        own.take(1, [6], last=False)
    assert not own.failed(Unavailable("whatever status follows"))


def test_a_lost_room_is_replaced_until_the_attempts_are_used_up() -> None:
    own = request(attempts=2)
    begin(own)
    assert own.failed(Unavailable("x", reason="stage_lost"))
    begin(own)
    assert not own.failed(Unavailable("x", reason="pairing_lost"))
    assert own.failures == ["stage_lost", "pairing_lost"]
    with pytest.raises(Fault):
        begin(own)


def test_what_fails_again_is_not_tried_again() -> None:
    own = request()
    begin(own)
    assert not own.failed(InvalidInput("x"))


def test_a_room_in_the_very_step_a_generation_died_in_is_tried_once_more_only() -> None:
    """docs/protocol.md §4: a prompt that kills pipelines does not kill a third."""
    own = request(attempts=9)
    begin(own)
    assert own.failed(Unavailable("x", reason=LOST_STEP))
    begin(own)
    assert own.failed(Unavailable("x", reason="stage_lost"))
    begin(own)
    assert not own.failed(Unavailable("x", reason=LOST_STEP))
