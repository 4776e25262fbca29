"""Load on a mesh: clients that ask one random question after the other until told to stop, and what they were answered."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from parity import Reference

from kvmesh.client import Client
from kvmesh.errors import Unavailable

CLIENTS = 5
ANSWER_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Answer:
    """One request, whole."""

    prompt: list[int]
    output: list[int]
    length: int
    """Tokens asked for."""
    attempts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOf:
    """What is asked: lengths in tokens, shortest and longest."""

    prompt_lens: tuple[int, int]
    output_lens: tuple[int, int]

    @asynccontextmanager
    async def on(self, gateway: str, reference: Reference, seed: int) -> AsyncIterator["Load"]:
        """Load until the block ends; then every request under way is answered."""
        load = Load(self, reference.vocab_size)
        async with Client(gateway) as client, asyncio.TaskGroup() as clients:
            for number in range(CLIENTS):
                clients.create_task(load.ask_on(client, random.Random(f"{seed} {number}")))
            yield load
            load.stopped = True


@dataclass(slots=True)
class Load:
    """What came of it so far."""

    asked: LoadOf
    vocab_size: int
    answers: list[Answer] = field(default_factory=list)
    lost: list[Unavailable] = field(default_factory=list)
    """A client ends with the first request it loses."""
    stopped: bool = False
    """What is under way is answered still."""
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def more(self, count: int) -> None:
        """Waits until so many further requests are answered, or one is lost."""
        wanted = len(self.answers) + count
        async with self._changed:
            await self._changed.wait_for(lambda: len(self.answers) >= wanted or self.lost)

    def check(self, reference: Reference) -> str:
        """Asserts that every answer is whole and right; how many there were, by attempts."""
        for answer in self.answers:
            reference.check(answer.prompt, answer.output, answer.length)
        attempts = Counter(answer.attempts for answer in self.answers)
        return f"{len(self.answers)} answers, by attempts {dict(sorted(attempts.items()))}, {len(self.lost)} lost"

    async def ask_on(self, client: Client, rng: random.Random) -> None:
        """One client."""
        while not self.stopped:
            prompt = [rng.randrange(self.vocab_size) for _ in range(rng.randint(*self.asked.prompt_lens))]
            try:
                self.answers.append(await _answered(client, prompt, rng.randint(*self.asked.output_lens)))
            except Unavailable as error:
                self.lost.append(error)
                return
            finally:
                async with self._changed:
                    self._changed.notify_all()


async def _answered(client: Client, prompt: list[int], length: int) -> Answer:
    output: list[int] = []
    attempts = 0
    async for piece in client.generate(
        tokens=prompt, max_output_tokens=length, ignore_eos=True, timeout_seconds=ANSWER_SECONDS
    ):
        assert piece.index == len(output), "no token twice, none missing"
        output += piece.tokens
        attempts = piece.end.attempts if piece.end is not None else attempts
    return Answer(prompt, output, length, attempts)
