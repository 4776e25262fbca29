"""A storm of aborts: many requests at once, some of them cancelled at random moments."""

import asyncio
import random
from collections.abc import Sequence

from parity import answer

from kvmesh.client import Client


async def storm(
    gateway: str, prompts: Sequence[Sequence[int]], *, output_len: int, share: float, within_seconds: float, seed: int
) -> list[list[int] | None]:
    """All prompts at once; the outputs, None for those that were cancelled.

    Args:
        output_len: tokens asked for by each.
        share: of the requests that are cancelled.
        within_seconds: all cancels come within this time.
    """
    rng = random.Random(seed)
    doomed = set(rng.sample(range(len(prompts)), int(len(prompts) * share)))
    async with Client(gateway) as client:
        calls = [asyncio.ensure_future(answer(client, prompt, output_len)) for prompt in prompts]
        for index in doomed:
            asyncio.get_running_loop().call_later(rng.uniform(0.0, within_seconds), calls[index].cancel)
        outputs = await asyncio.gather(*calls, return_exceptions=True)
    results: list[list[int] | None] = []
    for index, output in enumerate(outputs):
        if isinstance(output, asyncio.CancelledError):
            assert index in doomed
            results.append(None)
        elif isinstance(output, BaseException):
            raise output
        else:
            results.append(output)
    return results
