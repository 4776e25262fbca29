"""What lives together ends together."""

import asyncio

import pytest

from kvmesh.errors import Unavailable
from kvmesh.rpc.tasks import race, together


async def test_of_work_that_fails_nothing_goes_on() -> None:
    ended: list[str] = []

    async def fails() -> int:
        await asyncio.sleep(0)
        raise ValueError("first")

    async def goes_on() -> int:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("cancelled")
        return 1

    with pytest.raises(ValueError, match="first"):
        await together(goes_on(), fails(), goes_on())
    assert ended == ["cancelled"] * 2


async def test_results_come_in_the_order_of_the_work() -> None:
    async def after(turns: int) -> int:
        for _ in range(turns):
            await asyncio.sleep(0)
        return turns

    assert await together(after(3), after(0), after(1)) == [3, 0, 1]


async def test_of_errors_at_the_same_moment_the_one_that_nobody_expects_is_raised() -> None:
    async def fails(error: Exception) -> None:
        raise error

    for _ in range(50):  # they come as a set
        with pytest.raises(KeyError):
            await race(
                fails(Unavailable("a")), fails(Unavailable("b")), fails(KeyError("bug")), fails(Unavailable("c"))
            )
