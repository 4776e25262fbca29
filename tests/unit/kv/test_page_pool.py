"""KV out of one pool into another, through frames, with other pages, page sizes, layers and formats."""

import resource
import tracemalloc

import pytest
import torch

from kvmesh.errors import BadConfig, Corrupt, Misfit
from kvmesh.kv.frames import FrameHeader, FrameKind, open_frame, seal
from kvmesh.kv.layout import DTypeName, Piece, plan_frames
from kvmesh.kv.pool import PagePool

SOURCE_PAGES = [4, 5, 6, 1, 0]
TARGET_PAGES = [9, 3, 4, 5, 0, 12, 11]


def source_pool(dtype: DTypeName = "fp32", layers: tuple[int, int] = (2, 5)) -> PagePool:
    pool = PagePool(layers, num_kv_heads=2, head_dim=8, page_size=4, num_pages=7, dtype=dtype)
    pool.slots.copy_(torch.randn(pool.slots.shape, generator=torch.Generator().manual_seed(1)))
    return pool


def target_pool(dtype: DTypeName = "fp32", layers: tuple[int, int] = (1, 6), heads: int = 2) -> PagePool:
    pool = PagePool(layers, num_kv_heads=heads, head_dim=8, page_size=3, num_pages=13, dtype=dtype)
    pool.slots.fill_(7.0)
    return pool


def tokens_of(pool: PagePool, layer: int, pages: list[int], begin: int, end: int) -> torch.Tensor:
    """K and V of tokens, one by one by the definition of a page table: [2, H, T, D]."""
    slots = [pages[t // pool.page_size] * pool.page_size + t % pool.page_size for t in range(begin, end)]
    return torch.stack((pool.k(layer)[:, slots], pool.v(layer)[:, slots]))


@pytest.mark.parametrize("frame_bytes", [1, 300, 700, 5000, 1 << 20])
@pytest.mark.parametrize(("begin", "end"), [(0, 20), (3, 19), (7, 8)])
def test_kv_arrives_whole_in_other_pages(frame_bytes: int, begin: int, end: int) -> None:
    source, target = source_pool(), target_pool()
    for piece in plan_frames(source.shard, begin, end, frame_bytes):
        target.write(TARGET_PAGES, *open_frame(source.frame(SOURCE_PAGES, piece, room=1, pairing=1)))
    for layer in range(2, 5):
        sent = tokens_of(source, layer, SOURCE_PAGES, begin, end)
        assert torch.equal(tokens_of(target, layer, TARGET_PAGES, begin, end), sent)
    written = 3 * 2 * 2 * 8 * (end - begin)
    assert int((target.slots != 7.0).sum()) == written


def test_a_frame_says_what_it_carries() -> None:
    header, payload = open_frame(source_pool("bf16").frame(SOURCE_PAGES, Piece(3, 5, 2, 11), room=6, pairing=8))
    assert (header.room, header.pairing, header.dtype) == (6, 8, "bf16")
    assert header.kv_shape == (2, 2, 2, 9, 8)
    assert len(payload) == 2 * 2 * 2 * 9 * 8 * 2


def test_a_frame_is_sealed_into_a_slot_and_leaves_what_lies_behind() -> None:
    source, piece = source_pool(), Piece(3, 5, 2, 11)
    slot = memoryview(bytearray(b"\xaa" * 5000))
    length = source.seal_frame(slot, SOURCE_PAGES, piece, room=1, pairing=1)
    assert length == source.frame_bytes(piece)
    assert slot[:length] == source.frame(SOURCE_PAGES, piece, room=1, pairing=1)
    assert set(slot[length:]) == {0xAA}


def test_a_slot_that_is_too_short_is_refused() -> None:
    with pytest.raises(IndexError, match="does not fit 4000"):
        source_pool().seal_frame(memoryview(bytearray(4000)), SOURCE_PAGES, Piece(2, 5, 0, 20), room=1, pairing=1)


def test_a_frame_is_a_copy() -> None:
    source = source_pool()
    frame = source.frame(SOURCE_PAGES, Piece(2, 5, 0, 20), room=1, pairing=1)
    source.slots.zero_()
    assert torch.frombuffer(bytearray(open_frame(frame)[1]), dtype=torch.float32).count_nonzero() > 0


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_narrow_kv_keeps_every_value_in_an_fp32_pool(dtype: DTypeName) -> None:
    source, target = source_pool(dtype), target_pool("fp32")
    target.write(TARGET_PAGES, *open_frame(source.frame(SOURCE_PAGES, Piece(2, 5, 0, 20), room=1, pairing=1)))
    sent = tokens_of(source, 4, SOURCE_PAGES, 0, 20)
    received = tokens_of(target, 4, TARGET_PAGES, 0, 20)
    assert torch.equal(received.to(sent.dtype), sent)
    assert torch.equal(received, sent.float())


def refused(target: PagePool, frame: bytes, pages: list[int] = TARGET_PAGES) -> str:
    """The Misfit's message; nothing was written."""
    before = target.slots.view(torch.uint8).clone()  # bytes: what was never written may be no number
    with pytest.raises(Misfit) as caught:
        target.write(pages, *open_frame(frame))
    assert torch.equal(target.slots.view(torch.uint8), before)
    return caught.value.message


def test_kv_that_does_not_fit_is_refused_and_writes_nothing() -> None:
    frame = source_pool().frame(SOURCE_PAGES, Piece(2, 5, 0, 20), room=1, pairing=1)
    assert "layers [2, 5)" in refused(target_pool(layers=(0, 4)), frame)
    assert "layers [2, 5)" in refused(target_pool(layers=(3, 6)), frame)
    assert "heads [0, 2)" in refused(target_pool(heads=1), frame)
    assert "tokens [0, 20)" in refused(target_pool(), frame, pages=TARGET_PAGES[:6])
    one_too_many = source_pool().frame(SOURCE_PAGES, Piece(2, 5, 0, 19), room=1, pairing=1)
    assert "tokens [0, 19)" in refused(target_pool(), one_too_many, pages=TARGET_PAGES[:6])
    narrow = PagePool((0, 6), num_kv_heads=2, head_dim=4, page_size=3, num_pages=13, dtype="fp32")
    assert "head_dim 8" in refused(narrow, frame)


def test_a_message_without_kv_is_refused() -> None:
    target = target_pool()
    with pytest.raises(Misfit):
        target.write(TARGET_PAGES, *open_frame(seal(FrameHeader(FrameKind.CREDIT))))


@pytest.mark.parametrize("damage", ["flip", "cut"])
def test_a_damaged_frame_is_corrupt_and_writes_nothing(damage: str) -> None:
    target = target_pool()
    frame = bytearray(source_pool().frame(SOURCE_PAGES, Piece(2, 5, 0, 20), room=1, pairing=1))
    if damage == "flip":
        frame[1000] ^= 4
    else:
        del frame[-16:]
    with pytest.raises(Corrupt):
        target.write(TARGET_PAGES, *open_frame(frame))
    assert bool((target.slots == 7.0).all())


def test_a_piece_outside_the_pages_can_not_be_framed() -> None:
    with pytest.raises(IndexError):
        source_pool().frame(SOURCE_PAGES, Piece(2, 5, 0, 21), room=1, pairing=1)
    with pytest.raises(IndexError):
        source_pool().frame(SOURCE_PAGES, Piece(1, 5, 0, 20), room=1, pairing=1)


def test_a_pool_never_used_takes_no_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    pool = PagePool((0, 4), num_kv_heads=8, head_dim=128, page_size=16, num_pages=4096, dtype="fp32")
    assert pool.slots.nbytes == 2 << 30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB


def test_a_pool_larger_than_memory_is_bad_configuration() -> None:
    with pytest.raises(BadConfig, match=r"no memory for 16777216 pages of 64 tokens \(65536\.0 GiB\)"):
        PagePool((0, 8), num_kv_heads=8, head_dim=128, page_size=64, num_pages=1 << 24, dtype="fp32")


@pytest.mark.parametrize("tokens", [(0, 64), (3, 61)], ids=["whole pages", "ragged"])
def test_a_frame_of_some_heads_takes_the_memory_of_a_frame_and_not_of_the_pool(tokens: tuple[int, int]) -> None:
    pool = PagePool((0, 2), 4, 64, 16, 512, "fp32")
    pool.slots.normal_()
    pages = [300, 7, 41, 99]
    tracemalloc.start()
    try:
        message = pool.frame(pages, Piece(0, 2, *tokens, (1, 3)), room=1, pairing=1)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * len(message) < pool.slots.nbytes / 10
    slots = [pages[token // 16] * 16 + token % 16 for token in range(*tokens)]
    expected = pool.slots[:, :, 1:3, slots]
    assert torch.equal(torch.frombuffer(bytearray(message[64:]), dtype=torch.float32), expected.reshape(-1))
