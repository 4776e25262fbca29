"""KV between any two shapes: pipelines and decoders drawn at random, with the real pools, plans, frames and books of both.

Each world is one room: stages of uneven layers and shards of heads, pages, formats and frames of any size, in any order. The
decoder's pages must hold the KV itself, or what the format of the way may make of it, and nothing else may change.
"""

import random
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from kvmesh.errors import Corrupt, KvmeshError
from kvmesh.kv.frames import HEADER_BYTES, FrameHeader, open_frame, seal_into
from kvmesh.kv.layout import BLOCK_TOKENS, DTypeName, Piece, Shard, WireName, payload_bytes, plan_shards, wire_between
from kvmesh.kv.pool import PagePool
from kvmesh.kv.wire import FP16_LARGEST, LARGEST, SMALLEST_BLOCK, TORCH_DTYPES, decode, encode
from kvmesh.protocol.coverage import ShardSpan
from kvmesh.protocol.ids import PageId, PairingNumber, Rank, RoomId
from kvmesh.protocol.receiving import Outcome, Receiving

WORLDS = 600
DTYPES: tuple[DTypeName, ...] = ("fp32", "bf16", "fp16")
ROOM, PAIRING = RoomId(7), PairingNumber(3)
CANARY = -77.0
ROUNDING: dict[DTypeName, float] = {"fp32": 2.0**-22, "bf16": 2.0**-8, "fp16": 2.0**-10}
"""Relative, of one cast to nearest, with a bit to spare."""


@dataclass
class World:
    """One room between one pipeline and one decoder."""

    seed: int
    rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        rng = self.rng = random.Random(self.seed)
        self.heads, self.head_dim = rng.randint(1, 4), rng.choice([1, 3, 8, 16])
        pp = rng.randint(1, 6)
        self.layers = pp + rng.randint(0, 3)
        cuts = sorted({0, self.layers, *rng.sample(range(1, self.layers), pp - 1)})
        self.ranges = list(pairwise(cuts))
        self.stage_dtype, self.decoder_dtype = rng.choice(DTYPES), rng.choice(DTYPES)
        self.wire = wire_between(self.stage_dtype, self.decoder_dtype, rng.choice(["auto", "auto", "int8", "fp8"]))
        self.end = rng.randint(1, 70)
        size = rng.choice([1, 2, 3, 5, 8, 16, 24])
        self.begin = rng.randint(0, (self.end - 1) // size) * size
        self.decoder, self.decoder_pages = self._pool(size, self.decoder_dtype, (0, self.layers))
        self.decoder.slots.fill_(CANARY)
        size = rng.choice([1, 2, 3, 5, 8, 16, 24])
        self.stages, pages = [], None
        for layers in self.ranges:
            pool, pages = self._pool(size, self.stage_dtype, layers, pages)
            generator = torch.Generator().manual_seed(self.seed)
            values = torch.randn(pool.slots.shape, generator=generator) * 10.0 ** rng.uniform(-3, 3)
            pool.slots.copy_(values)
            self.stages.append(pool)
        assert pages is not None
        self.stage_pages = pages
        self.shards = [self._shards(pool.shard) for pool in self.stages]

    def _pool(
        self, size: int, dtype: DTypeName, layers: tuple[int, int], pages: list[int] | None = None
    ) -> tuple[PagePool, list[int]]:
        """A pool with room to spare, and the room's pages: scattered, in a row, or in short runs."""
        needed = -(-self.end // size)
        total = 2 * needed + 3
        if pages is None:
            pages = self.rng.sample(range(total), needed)
            first = self.rng.randint(0, total - needed)
            pages = self.rng.choice([pages, sorted(pages), list(range(first, first + needed))])
        return PagePool(layers, self.heads, self.head_dim, size, total, dtype), pages

    def _shards(self, whole: Shard) -> list[Shard]:
        cuts = [0, *sorted(self.rng.sample(range(1, self.heads), self.rng.randint(0, self.heads - 1))), self.heads]
        pairs = list(pairwise(cuts))
        self.rng.shuffle(pairs)
        return [Shard(whole.layer_begin, whole.layer_end, a, b, whole.head_dim, whole.dtype) for a, b in pairs]

    def sent(self) -> list[tuple[Rank, Piece, bytes]]:
        """All frames, shuffled across stages. The plan is cut in spans first, as steps cut a prompt."""
        frames: list[tuple[Rank, Piece, bytes]] = []
        for rank, (pool, shards) in enumerate(zip(self.stages, self.shards, strict=True)):
            cuts = {self.rng.randint(self.begin, self.end) for _ in range(self.rng.randint(0, 3))}
            spans = sorted({self.begin, self.end, *cuts})
            frame_bytes = self.rng.choice([200, 1000, 5000, 1 << 20])
            for begin, end in pairwise(spans):
                for piece in plan_shards(shards, begin, end, frame_bytes, self.wire):
                    frame = pool.frame(self.stage_pages, piece, room=ROOM, pairing=PAIRING)
                    assert len(frame) == pool.frame_bytes(piece)
                    frames.append((Rank(rank), piece, frame))
        self.rng.shuffle(frames)
        return frames

    def books(self) -> Receiving:
        """The decoder's, with the room open."""
        spans = {
            Rank(rank): tuple(ShardSpan(s.layer_begin, s.layer_end, s.head_begin, s.head_end) for s in shards)
            for rank, shards in enumerate(self.shards)
        }
        books = Receiving()
        pages = tuple(PageId(page) for page in self.decoder_pages)
        books.open(ROOM, PAIRING, spans, pages, begin=self.begin, end=self.end)
        return books

    def arrives(self, books: Receiving, rank: Rank, message: bytes, link: PairingNumber = PAIRING) -> Outcome:
        """What the decoder does with a message of a link; raises as it does."""
        header, payload = open_frame(message)
        span = ShardSpan(header.layer_begin, header.layer_end, header.head_begin, header.head_end)
        outcome = books.frame(
            RoomId(header.room), PairingNumber(header.pairing), (link, rank), span, header.token_begin, header.token_end
        )
        if outcome is Outcome.WRITTEN:
            self.decoder.write(self.decoder_pages, header, payload)
        return outcome

    def slots(self, pool: PagePool, pages: list[int]) -> list[int]:
        """Of the planned tokens, one by one by the definition of a page table."""
        size = pool.page_size
        return [pages[t // size] * size + t % size for t in range(self.begin, self.end)]

    def check(self, frames: list[tuple[Rank, Piece, bytes]]) -> None:
        """Asserts that the decoder's pages hold what was sent, and that all else is untouched."""
        slots = self.slots(self.decoder, self.decoder_pages)
        for rank, piece, _ in frames:
            assert piece.heads is not None
            source = self.stages[rank]
            of_heads, tokens = slice(*piece.heads), slice(piece.token_begin - self.begin, piece.token_end - self.begin)
            for layer in range(piece.layer_begin, piece.layer_end):
                exact = source.kv(layer)[:, of_heads, self.slots(source, self.stage_pages)[tokens]].float()
                there = self.decoder.kv(layer)[:, of_heads, slots[tokens]]
                if self.wire in LARGEST:
                    self._check_near(exact, there.float(), self.wire)
                else:
                    assert torch.equal(there, expected(exact, self.wire, self.decoder_dtype)), self.seed
        untouched = self.decoder.slots.clone()
        untouched[:, :, :, slots] = CANARY
        assert bool((untouched == CANARY).all()), self.seed

    def _check_near(self, exact: Tensor, there: Tensor, wire: WireName) -> None:
        for begin in range(0, exact.shape[2], BLOCK_TOKENS):
            x, y = exact[:, :, begin : begin + BLOCK_TOKENS], there[:, :, begin : begin + BLOCK_TOKENS]
            largest = x.abs().amax((2, 3), keepdim=True)
            bound = largest / 254 if wire == "int8" else torch.maximum(x.abs() / 16, largest / 448 / 1024)
            # The decoder's own rounding, and its smallest number; fp16 saturates.
            slack = (x.abs() + bound) * ROUNDING[self.decoder_dtype] + largest * 2.0**-20 + 2.0**-24
            if self.decoder_dtype == "fp16":
                x = x.clamp(-FP16_LARGEST, FP16_LARGEST)
            assert bool(((x - y).abs() <= bound + slack).all()), self.seed


def expected(exact: Tensor, wire: WireName, dtype: DTypeName) -> Tensor:
    """A value after the way: through the wire's format into the decoder's, by torch's own casts, saturated in fp16."""
    for name in (wire, dtype):
        target = TORCH_DTYPES[name]  # type: ignore[index]
        exact = (exact.clamp(-FP16_LARGEST, FP16_LARGEST) if name == "fp16" else exact).to(target).float()
    return exact.to(TORCH_DTYPES[dtype])


@pytest.mark.parametrize("first", range(0, WORLDS, 100))
def test_the_decoders_pages_hold_the_kv_and_nothing_else_changes(first: int) -> None:
    for seed in range(first, first + 100):
        world = World(seed)
        frames, books = world.sent(), world.books()
        coverage = books.rooms[ROOM].coverage
        for rank, _, message in frames:
            assert not coverage.complete, seed
            assert world.arrives(books, rank, message) is Outcome.WRITTEN, seed
        assert coverage.complete, seed
        world.check(frames)


def resealed(message: bytes, **fields: int) -> bytes:
    """The same payload under a sound header that says something else."""
    header, _ = open_frame(message)
    values = {name: getattr(header, name) for name in FrameHeader.__dataclass_fields__}
    view = memoryview(bytearray(message))
    seal_into(view, FrameHeader(**{**values, **fields}))
    return bytes(view)


@pytest.mark.parametrize("seed", range(1000, 1060))
def test_no_frame_that_is_damaged_repeated_foreign_or_late_reaches_a_page(seed: int) -> None:
    world = World(seed)
    frames, books, rng = world.sent(), world.books(), world.rng
    for at, (rank, piece, message) in enumerate(frames):
        if at % (1 + len(frames) // 10):  # ten of them are enough
            assert world.arrives(books, rank, message) is Outcome.WRITTEN
            continue
        before = world.decoder.slots.clone()
        flipped = bytearray(message)
        flipped[rng.randrange(len(message))] ^= 1 << rng.randrange(8)
        cut = message[: rng.randrange(len(message))]
        for damaged in (bytes(flipped), cut, message + b"\0"):
            with pytest.raises(Corrupt):
                world.arrives(books, rank, damaged)
        assert world.arrives(books, rank, resealed(message, room=8)) is Outcome.LATE
        assert world.arrives(books, rank, resealed(message, pairing=4)) is Outcome.FOREIGN
        assert world.arrives(books, rank, message, PairingNumber(2)) is Outcome.FOREIGN
        other = resealed(message, token_begin=world.end, token_end=world.end + piece.token_end - piece.token_begin)
        with pytest.raises(KvmeshError):
            world.arrives(books, rank, other)
        if len(world.stages) > 1:
            with pytest.raises(Corrupt):
                world.arrives(books, Rank((rank + 1) % len(world.stages)), message)
        assert torch.equal(world.decoder.slots, before)
        assert world.arrives(books, rank, message) is Outcome.WRITTEN
        written = world.decoder.slots.clone()
        assert world.arrives(books, rank, message) is Outcome.REPEATED
        assert torch.equal(world.decoder.slots, written)
    world.check(frames)
    books.close(ROOM)
    written = world.decoder.slots.clone()
    for rank, _, message in frames:
        assert world.arrives(books, rank, message) is Outcome.LATE
    assert torch.equal(world.decoder.slots, written)


def test_a_frame_is_no_longer_than_its_header_says() -> None:
    world = World(5)
    for _, _, message in world.sent():
        header, payload = open_frame(message)
        assert header.kv_bytes == len(payload) == len(message) - HEADER_BYTES
        assert (header.block_tokens > 0) == (world.wire in LARGEST)


def through(values: Tensor, wire: WireName, dtype: DTypeName = "fp32") -> Tensor:
    """[T, D] numbers of one head through a frame into another pool."""
    tokens, head_dim = values.shape
    source = PagePool((0, 1), 1, head_dim, tokens, 1, "fp32")
    source.slots.copy_(values.expand_as(source.slots))
    target = PagePool((0, 1), 1, head_dim, 1, tokens, dtype)
    pages = list(reversed(range(tokens)))
    target.write(pages, *open_frame(source.frame([0], Piece(0, 1, 0, tokens, wire=wire), room=1, pairing=1)))
    return target.k(0)[0, pages].float()


def coded(values: Tensor, wire: WireName, block_tokens: int) -> Tensor:
    """[T, D] numbers of one head through a payload whose scales stand for `block_tokens` tokens each."""
    payload = memoryview(bytearray(payload_bytes(wire, 1, 1, *values.shape, block_tokens)))
    both = values.expand(1, 2, 1, *values.shape).contiguous()
    encode(both, wire, payload, block_tokens)
    there = decode(payload, wire, (1, 2, 1, values.shape[0], values.shape[1]), block_tokens, "fp32")
    assert torch.equal(there[0, 0].nan_to_num(), there[0, 1].nan_to_num())
    return there[0, 0, 0]


@pytest.mark.parametrize("wire", ["int8", "fp8"])
@pytest.mark.parametrize("block", [1, 5, 16, 700])
def test_zeros_arrive_as_zeros_and_what_is_no_number_spoils_its_own_block_only(wire: WireName, block: int) -> None:
    values = torch.linspace(-1, 1, (4 * block + 1) * 3).view(-1, 3).contiguous()
    zero, nan, infinite, sound = (slice(i * block, (i + 1) * block) for i in range(4))
    values[zero] = 0
    values[nan.stop - 1, 1] = torch.nan
    values[infinite.start, 0] = -torch.inf
    there = coded(values, wire, block)
    assert bool((there[zero] == 0).all())
    assert bool(there[nan].isnan().all())
    assert bool(there[infinite].isnan().all())
    for part in (sound, slice(4 * block, None)):  # the last block is one token
        assert bool(((there[part] - values[part]).abs() <= values[part].abs().max() / 16).all())


@pytest.mark.parametrize("block", [1, 3, 16, 600])
@pytest.mark.parametrize("num_tokens", [1, 16, 47, 1300])
def test_the_stated_error_holds_for_blocks_of_any_size(block: int, num_tokens: int) -> None:
    values = torch.randn(num_tokens, 64, generator=torch.Generator().manual_seed(block)) * 30
    for begin in range(0, num_tokens, block):
        x = values[begin : begin + block]
        largest = float(x.abs().max())
        slack = largest * 2.0**-20
        near = coded(values, "int8", block)[begin : begin + block]
        assert bool(((x - near).abs() <= largest / 254 + slack).all())
        near = coded(values, "fp8", block)[begin : begin + block]
        assert bool(((x - near).abs() <= (x.abs() / 16).clamp(min=largest / 448 / 1024) + slack).all())
        if begin > 3 * block:
            break


@pytest.mark.parametrize("wire", ["int8", "fp8"])
@pytest.mark.parametrize("largest", [SMALLEST_BLOCK / 2, SMALLEST_BLOCK, 1.0, 3e38])
def test_the_largest_of_a_block_arrives_at_any_magnitude(wire: WireName, largest: float) -> None:
    values = torch.tensor([[largest, -largest], [0.0, largest / 2]])
    there = coded(values, wire, 2)
    wanted = values if largest >= SMALLEST_BLOCK else torch.zeros(2, 2)
    assert bool(((there - wanted).abs() <= largest / 200).all())
    assert bool(there.isfinite().all())


def test_every_number_of_e4m3_is_restored_as_it_is() -> None:
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(torch.float8_e4m3fn).float()
    values = codes[codes.isfinite()].view(1, -1)  # its largest is 448: the scale is 1
    assert torch.equal(through(values, "fp8"), values)


@pytest.mark.parametrize("wire", ["fp16", "fp32"])
def test_what_is_too_large_for_fp16_saturates(wire: WireName) -> None:
    values = torch.tensor([[1e6, -1e6, 70000.0, torch.inf, -torch.inf, 3.0, 65504.0, 65519.0]])
    wanted = [FP16_LARGEST, -FP16_LARGEST, FP16_LARGEST, FP16_LARGEST, -FP16_LARGEST, 3.0, FP16_LARGEST, FP16_LARGEST]
    assert through(values, wire, "fp16").tolist() == [wanted]
