"""What a decoder holds of frames it has read and not yet dealt with is bounded."""

import asyncio

import pytest

from services.decode.in_flight import InFlight


async def test_nothing_more_is_read_at_the_bound_until_something_was_dealt_with() -> None:
    held = InFlight(100)
    held.took(60)
    await asyncio.wait_for(held.below_limit(), 1)
    held.took(60)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(held.below_limit(), 0.05)
    waiting = [asyncio.create_task(held.below_limit()) for _ in range(3)]
    held.dealt(60)
    await asyncio.gather(*waiting)
    held.dealt(60)
    assert held.num_bytes == 0
