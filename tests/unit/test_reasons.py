"""A reason passes from peer to peer, and a metric's label is one that kvmesh.errors lists, or `other`."""

import pytest

from kvmesh.errors import OTHER, REASONS, Unavailable, reason_heard


def test_every_reason_passes_from_peer_to_peer_and_into_a_label_as_it_is() -> None:
    assert {reason_heard(reason) for reason in REASONS} == set(REASONS)
    assert {Unavailable("x", reason=reason).label for reason in REASONS} == set(REASONS)


def test_a_word_of_a_newer_peer_passes_and_is_counted_as_other() -> None:
    error = Unavailable("x", reason=reason_heard("moon_is_full"))
    assert (error.reason, error.label) == ("moon_is_full", OTHER)


@pytest.mark.parametrize("text", ["", "Jane Doe", "a" * 41, "stage_lost\n", "x-1", "é", "\x1b[2J"])
def test_what_is_no_word_is_other(text: str) -> None:
    assert reason_heard(text) == OTHER
