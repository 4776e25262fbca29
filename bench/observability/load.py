"""What the mesh does while it is measured, by the client's clock: long answers side by side, and short requests that pass.

Called by the pairs.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

import grpc

from kvmesh.v1.inference_pb2 import GenerateRequest, TokenIds
from kvmesh.v1.inference_pb2_grpc import InferenceServiceStub

PROMPT_TOKENS, PASSING_TOKENS = 2, 2
"""Short prompts: what is looked for is in the decode. A passing room decodes one step and is gone."""


class Mark(NamedTuple):
    """So many tokens had come, by then."""

    num_tokens: int
    at: float


class Arrivals:
    """The tokens of all long answers together, as they come."""

    def __init__(self) -> None:
        self.latest = Mark(0, perf_counter())
        self._news = asyncio.Event()

    def came(self, num_tokens: int) -> None:
        """Some more."""
        self.latest = Mark(self.latest.num_tokens + num_tokens, perf_counter())
        self._news.set()

    async def reach(self, num_tokens: int) -> Mark:
        """Waits until that many have come."""
        while self.latest.num_tokens < num_tokens:
            self._news.clear()
            await self._news.wait()
        return self.latest


@dataclass(frozen=True, slots=True)
class Load:
    """So many long answers at once, all greedy and equally long."""

    num_answers: int
    answer_tokens: int

    @asynccontextmanager
    async def streaming(self, channel: grpc.aio.Channel) -> AsyncIterator[Arrivals]:
        """Long answers, the next one as soon as one has ended, until it is left.

        Args:
            channel: to the gateway.
        """
        arrivals = Arrivals()
        firsts = [asyncio.Event() for _ in range(self.num_answers)]
        async with asyncio.TaskGroup() as tasks:
            asked = [
                tasks.create_task(self._stream(channel, _prompt(number), first, arrivals))
                for number, first in enumerate(firsts)
            ]
            for first in firsts:
                await first.wait()
            yield arrivals
            for task in asked:
                task.cancel()

    async def _stream(
        self, channel: grpc.aio.Channel, prompt: Sequence[int], first: asyncio.Event, arrivals: Arrivals
    ) -> None:
        while True:
            async for num_tokens in _answer(channel, prompt, self.answer_tokens, ()):
                arrivals.came(num_tokens)
                first.set()


async def pass_by(channel: grpc.aio.Channel, traceparent: str) -> None:
    """A short request beside the long ones, from its first span to its last.

    Args:
        traceparent: what it is part of, in W3C's form.
    """
    async for _ in _answer(channel, _prompt(-1), PASSING_TOKENS, (("traceparent", traceparent),)):
        pass


async def _answer(
    channel: grpc.aio.Channel, prompt: Sequence[int], num_tokens: int, metadata: Sequence[tuple[str, str]]
) -> AsyncIterator[int]:
    """How many tokens each message brings, to the call's status: then the gateway is done with it."""
    request = GenerateRequest(tokens=TokenIds(ids=prompt), max_output_tokens=num_tokens, ignore_eos=True)
    async for response in InferenceServiceStub(channel).Generate(request, metadata=tuple(metadata)):
        yield len(response.tokens)


def _prompt(number: int) -> list[int]:
    """Ids of ordinary tokens; which ones makes no difference to the time."""
    return [(31 * number + 7 * k) % 200 + 20 for k in range(PROMPT_TOKENS)]
