import random

import pytest

from kvmesh.protocol.ids import PageId
from kvmesh.protocol.pages import Pages, pages_for


def test_a_take_is_all_or_nothing() -> None:
    pages = Pages(4)
    assert pages.take(5) is None
    assert pages.free == 4
    assert pages.take(4) == (0, 1, 2, 3)
    assert pages.take(1) is None


def test_a_take_prefers_the_smallest_contiguous_run_that_fits() -> None:
    pages = Pages(10)
    first, second, _third = pages.take(2), pages.take(3), pages.take(2)
    assert first is not None
    assert second is not None
    pages.give(first)
    pages.give(second)  # free: 0-4 and 7-9
    assert pages.take(3) == (7, 8, 9)
    assert pages.take(5) == (0, 1, 2, 3, 4)


def test_scattered_pages_are_used_when_no_run_fits() -> None:
    pages = Pages(6)
    taken = pages.take(6)
    assert taken is not None
    pages.give([PageId(0)])
    pages.give([PageId(2), PageId(3)])
    pages.give([PageId(5)])
    scattered = pages.take(4)
    assert scattered is not None
    assert sorted(scattered) == [0, 2, 3, 5]
    assert pages.free == 0


@pytest.mark.parametrize("page", [-1, 4])
def test_a_page_outside_the_pool_is_refused(page: int) -> None:
    pages = Pages(4)
    pages.take(2)
    with pytest.raises(ValueError, match="outside a pool"):
        pages.give([PageId(page)])


def test_a_page_given_back_twice_is_refused_and_changes_nothing() -> None:
    pages = Pages(4)
    taken = pages.take(3)
    assert taken is not None
    pages.give(taken[:1])
    for wrong in ([PageId(0)], [PageId(1), PageId(0)], [PageId(1), PageId(1)]):
        with pytest.raises(ValueError, match="twice"):
            pages.give(wrong)
    assert pages.free == 2
    pages.check([taken[1:]])


@pytest.mark.parametrize("seed", range(20))
def test_the_books_balance_after_any_history(seed: int) -> None:
    rng = random.Random(seed)
    pages, held = Pages(50), []
    for _ in range(400):
        if held and rng.random() < 0.5:
            pages.give(held.pop(rng.randrange(len(held))))
        else:
            taken = pages.take(rng.randint(1, 12))
            if taken is not None:
                held.append(taken)
        pages.check(held)
    for taken in held:
        pages.give(taken)
    assert pages.take(50) == tuple(range(50))


@pytest.mark.parametrize("wrong", [0, -1])
def test_nothing_is_not_a_number_of_pages(wrong: int) -> None:
    with pytest.raises(ValueError, match="pages"):
        Pages(wrong)
    with pytest.raises(ValueError, match="take"):
        Pages(1).take(wrong)


def test_pages_for_rounds_up() -> None:
    assert [pages_for(n, 16) for n in (1, 16, 17, 32)] == [1, 1, 2, 2]


def test_an_audit_finds_a_page_that_nobody_holds() -> None:
    pages = Pages(4)
    pages.take(2)
    with pytest.raises(ValueError, match="whole pool"):
        pages.check([])
