"""A decoder that keeps a prompt's pages: what it says it has is not sent. A real pipeline of two stages; the decoder is played.

Its pages, its plan and its model are real. Only the sending is saved so far: the stages compute the whole prompt anew.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import pytest
import torch
from test_prefill import PlayedDecoder, Stage, described, in_background, stages_of

from kvmesh.kv.frames import FrameKind
from kvmesh.kv.layout import runs
from kvmesh.kv.pool import PagePool
from kvmesh.model.files import ModelFiles
from kvmesh.model.runner import Runner, Span
from kvmesh.protocol.coverage import ShardSpan
from kvmesh.protocol.ids import PageId, PairingNumber, Rank, RoomId
from kvmesh.protocol.receiving import OpenedRoom, Outcome, Receiving
from kvmesh.v1 import prefill_pb2 as pb

LAYERS, PAGE_SIZE, NUM_PAGES = 6, 6, 40
"""Of the decoder; the pipeline's pages have 4 tokens, its steps 16."""
FIRST = [(7 * i + 3) % 256 for i in range(45)]
SECOND = [*FIRST, *((11 * i + 5) % 256 for i in range(13))]
KEPT_LEN = len(FIRST) // PAGE_SIZE * PAGE_SIZE
"""42 tokens: neither whole pages of the pipeline nor whole steps."""
OUTPUT_LEN = 8
FRESH, NUMBERS = count(1), count(1)


@dataclass
class Got:
    """A room as it came: its frames' tokens and layers, its first token, and the KV in its pages, [L, 2, H, T, D]."""

    pages: tuple[PageId, ...]
    first_token: int = -1
    frames: list[tuple[int, int, int, int]] = field(default_factory=list)
    kv: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def covered(self) -> list[tuple[int, int]]:
        """Each (layer, token) as often as it came."""
        return [
            (la, t) for begin, end, first, stop in self.frames for la in range(begin, end) for t in range(first, stop)
        ]


class KeepingDecoder:
    """Links to both stages and control; every room gets the pages that a test names."""

    def __init__(self, stages: Sequence[Stage], stack: AsyncExitStack, runner: Runner) -> None:
        self._runner, self._receiving = runner, Receiving()
        self._number = PairingNumber(next(NUMBERS))
        self._stages = [PlayedDecoder(stage, stack) for stage in stages]
        self._shards: dict[Rank, tuple[ShardSpan, ...]] = {}
        for one in self._stages:
            one.hello.pairing = one.opening.pairing = self._number
            one.hello.descriptor.page_size = PAGE_SIZE

    async def pair(self) -> None:
        """Last rank first."""
        for rank, stage in reversed([*enumerate(self._stages)]):
            welcome = await stage.link()
            self._shards[Rank(rank)] = tuple(
                ShardSpan(welcome.layers.begin, welcome.layers.end, heads.begin, heads.end) for heads in welcome.heads
            )
        await self._stages[0].control()

    async def receive(self, tokens: list[int], pages: Sequence[int], cached_len: int = 0) -> Got:
        """Has a room prefilled into these pages, the first of which hold `cached_len` tokens already."""
        room, got = RoomId(next(FRESH)), Got(tuple(PageId(p) for p in pages))
        opened = self._receiving.open(room, self._number, self._shards, got.pages, begin=cached_len, end=len(tokens))
        await self.say(admit=pb.Admit(room=room, tokens=tokens, cached_len=cached_len))
        async with asyncio.TaskGroup() as tasks:
            for rank in self._shards:
                tasks.create_task(self._read(rank, opened, got))
        assert opened.first_token is not None
        got.first_token, got.kv = opened.first_token, kv_of(self._runner.pool, pages, len(tokens))
        self._receiving.close(room)
        await self.say(received=room)
        return got

    async def refusal(self, tokens: list[int], cached_len: int) -> pb.RoomRefused:
        await self.say(admit=pb.Admit(room=next(FRESH), tokens=tokens, cached_len=cached_len))
        return (await self._stages[0].answer()).refused

    async def say(self, **message: object) -> None:
        await self._stages[0].say(**message)

    async def _read(self, rank: Rank, opened: OpenedRoom, got: Got) -> None:
        """Reads a link until its shard is whole, with the first token where that comes."""
        (shard,) = self._shards[rank]
        missing = (shard.layer_end - shard.layer_begin) * (opened.coverage.end - opened.coverage.begin)
        while missing or (rank == len(self._shards) - 1 and opened.first_token is None):
            header, payload = await self._stages[rank].frame()
            room, pairing, link = RoomId(header.room), PairingNumber(header.pairing), (self._number, rank)
            if header.kind is FrameKind.FIRST_TOKEN:
                token = pb.FirstToken.FromString(bytes(payload)).token
                outcome = self._receiving.first_token(room, pairing, link, token, self._runner.vocab_size)
            else:
                piece = ShardSpan(header.layer_begin, header.layer_end, header.head_begin, header.head_end)
                outcome = self._receiving.frame(room, pairing, link, piece, header.token_begin, header.token_end)
                self._runner.pool.write(opened.pages, header, payload)
                got.frames.append((header.layer_begin, header.layer_end, header.token_begin, header.token_end))
                missing -= (header.layer_end - header.layer_begin) * (header.token_end - header.token_begin)
            assert outcome is Outcome.WRITTEN

    def greedy(self, got: Got, prompt_len: int) -> list[int]:
        """What the decoder answers from the KV it has."""
        output = [got.first_token]
        for end in range(prompt_len + 1, prompt_len + OUTPUT_LEN):
            span = Span(got.pages, end - 1, end, sample=True)
            output.append(int(self._runner.forward([span], torch.tensor(output[-1:])).argmax()))
        return output


def kv_of(pool: PagePool, pages: Sequence[int], num_tokens: int) -> torch.Tensor:
    """The KV of a room, [L, 2, H, T, D]."""
    parts = [
        pool.slots[:, :, :, r.slot_begin : r.slot_begin + r.num_tokens] for r in runs(pages, PAGE_SIZE, 0, num_tokens)
    ]
    return torch.cat(parts, dim=3)


def reference(runner: Runner, prompt: list[int]) -> list[int]:
    """The answer of one process that computes everything itself, in pages of its own."""
    pages, output = range(NUM_PAGES - 12, NUM_PAGES), list[int]()
    inputs, begin = prompt, 0
    while len(output) < OUTPUT_LEN:
        span = Span(pages, begin, begin + len(inputs), sample=True)
        output.append(int(runner.forward([span], torch.tensor(inputs)).argmax()))
        begin, inputs = span.end, output[-1:]
    return output


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Iterator[str]:
    with in_background(tmp_path_factory.mktemp("keeping"), tiny_model_dir, 2) as address:
        yield address


@pytest.fixture
def runner(tiny_model_dir: Path) -> Runner:
    files = ModelFiles.open(tiny_model_dir)
    return Runner.load(files, 0, LAYERS, dtype="fp32", device="cpu", num_pages=NUM_PAGES, page_size=PAGE_SIZE)


@pytest.fixture
async def decoder(registry: str, runner: Runner) -> AsyncIterator[KeepingDecoder]:
    async with AsyncExitStack() as stack:
        made = KeepingDecoder(await stages_of(registry), stack, runner)
        await made.pair()
        yield made


async def test_a_decoder_that_kept_a_prompts_pages_is_sent_the_rest_and_answers_the_same(
    decoder: KeepingDecoder, runner: Runner
) -> None:
    kept = await decoder.receive(FIRST, range(10))
    assert sorted(kept.covered) == [(layer, token) for layer in range(LAYERS) for token in range(len(FIRST))]
    first_pages = KEPT_LEN // PAGE_SIZE
    before = kv_of(runner.pool, range(first_pages), KEPT_LEN).clone()

    # Its own pages behind those it shares, out of order.
    resumed = await decoder.receive(SECOND, [*range(first_pages), 23, 12, 13, 14, 15], cached_len=KEPT_LEN)
    assert sorted(resumed.covered) == [(la, t) for la in range(LAYERS) for t in range(KEPT_LEN, len(SECOND))]
    assert torch.equal(kv_of(runner.pool, range(first_pages), KEPT_LEN), before), "the kept pages were not written"

    whole = await decoder.receive(SECOND, range(16, 28))
    assert sorted(whole.covered) == [(layer, token) for layer in range(LAYERS) for token in range(len(SECOND))]
    assert resumed.first_token == whole.first_token
    assert torch.equal(resumed.kv[:, :, :, KEPT_LEN:], whole.kv[:, :, :, KEPT_LEN:])
    torch.testing.assert_close(resumed.kv, whole.kv, rtol=0, atol=1e-5)  # the first prompt had other steps
    assert decoder.greedy(resumed, len(SECOND)) == reference(runner, SECOND)


async def test_of_a_prompt_that_a_decoder_has_all_but_one_token_of_that_one_comes(
    decoder: KeepingDecoder, runner: Runner
) -> None:
    """cached_len is at most prompt_len - 1: the last token's KV comes, and with it the first token."""
    prompt = FIRST[: KEPT_LEN + 1]
    await decoder.receive(prompt, range(9))
    got = await decoder.receive(prompt, range(9), cached_len=KEPT_LEN)
    assert sorted(got.covered) == [(layer, KEPT_LEN) for layer in range(LAYERS)]
    assert decoder.greedy(got, len(prompt)) == reference(runner, prompt)


@pytest.mark.parametrize(
    ("cached_len", "says"),
    [
        (4, "cached_len 4 is not in whole pages of 6 tokens"),  # a page of the pipeline
        (KEPT_LEN + 1, "cached_len 43 is not in whole pages of 6 tokens"),
        (48, "cached_len 48 is outside [0, 45)"),
        (45, "cached_len 45 is outside [0, 45)"),
        (0xFFFFFFFF, "cached_len 4294967295 is outside [0, 45)"),
    ],
)
async def test_what_a_decoder_can_not_have_is_refused_and_the_next_room_comes(
    decoder: KeepingDecoder, registry: str, cached_len: int, says: str
) -> None:
    refused = await decoder.refusal(FIRST, cached_len)
    assert (refused.reason, refused.detail) == ("bad_cached_len", says)
    assert len((await decoder.receive(FIRST, range(10))).covered) == LAYERS * len(FIRST)
    async with asyncio.timeout(10):
        for stage in await stages_of(registry):
            while (await described(stage)).open_rooms:
                pass
