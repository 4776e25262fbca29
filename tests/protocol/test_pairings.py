"""Whom a decoder pairs with, and again after a loss."""

import pytest

from kvmesh.errors import Fenced
from kvmesh.protocol.ids import Generation
from kvmesh.protocol.pairings import PairingBook

G1, G2 = Generation(1), Generation(2)


def test_each_generation_that_is_named_is_begun_once() -> None:
    book = PairingBook()
    assert book.named([G1]) == ([G1], [])
    assert book.named([G1, G2]) == ([G2], [])


def test_one_that_is_named_no_more_is_given_up_unless_it_stands() -> None:
    """F-N1: a registry that forgets does not end what runs."""
    book = PairingBook()
    book.named([G1, G2])
    book.stands(G1, book.next_number())
    assert book.named([]) == ([], [G2])
    assert book.standing == [G1]


def test_a_standing_pairing_that_is_lost_is_made_again_under_a_higher_number_while_it_is_named() -> None:
    book = PairingBook()
    book.named([G1])
    first = book.next_number()
    book.stands(G1, first)
    assert book.lost(G1, first)
    assert book.may_pair_again(G1)
    assert book.next_number() > first
    book.named([])
    assert not book.may_pair_again(G1)


def test_one_that_falls_takes_no_room_and_is_not_given_up_before_it_is_lost() -> None:
    book = PairingBook()
    book.named([G1])
    number = book.next_number()
    book.stands(G1, number)
    assert book.falls(G1, number)
    assert not book.falls(G1, number)
    with pytest.raises(Fenced):
        book.require(G1)
    assert book.named([]) == ([], [])
    assert book.lost(G1, number), "its rooms must hear of it"
    assert not book.lost(G1, number)
    assert book.named([]) == ([], [G1])


def test_a_late_loss_of_an_older_number_does_not_touch_its_successor() -> None:
    book = PairingBook()
    book.named([G1])
    first, second = book.next_number(), book.next_number()
    book.stands(G1, second)
    assert not book.lost(G1, first)
    assert book.require(G1) == second


def test_one_that_is_over_may_be_named_and_begun_anew() -> None:
    book = PairingBook()
    book.named([G1])
    book.over(G1)
    assert book.named([G1]) == ([G1], [])


def test_a_room_without_a_standing_pairing_is_refused() -> None:
    book = PairingBook()
    book.named([G1])
    with pytest.raises(Fenced, match="no pairing"):
        book.require(G1)
