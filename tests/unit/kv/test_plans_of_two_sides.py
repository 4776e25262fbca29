"""What a stage cuts and what a decoder counts: neither derives the other's cut, and small pages cost no small pieces."""

import pytest

from kvmesh.kv.layout import FRAME_BYTES, Shard, plan_frames, runs
from kvmesh.protocol.coverage import Arrival, Coverage, ShardSpan
from kvmesh.protocol.ids import Rank
from kvmesh.protocol.pages import Pages

SHARDS = {Rank(0): Shard(0, 3, 0, 2, 16, "fp32"), Rank(1): Shard(3, 8, 0, 2, 16, "fp32")}


@pytest.mark.parametrize("cached_len", [0, 16, 99])
@pytest.mark.parametrize("frame_bytes", [(1, 1), (300, 5000), (1 << 20, 256)])
def test_a_room_is_complete_whatever_frames_each_stage_chooses(cached_len: int, frame_bytes: tuple[int, int]) -> None:
    """F-C7: each frame says what it carries; the plan alone is agreed, and it was sent with Admit."""
    spans = {r: [ShardSpan(s.layer_begin, s.layer_end, s.head_begin, s.head_end)] for r, s in SHARDS.items()}
    coverage = Coverage(spans, cached_len, 100)
    for rank, shard in SHARDS.items():
        for piece in plan_frames(shard, cached_len, 100, frame_bytes[rank]):
            assert not coverage.complete
            carried = ShardSpan(piece.layer_begin, piece.layer_end, shard.head_begin, shard.head_end)
            assert coverage.offer(rank, carried, piece.token_begin, piece.token_end) is Arrival.NEW
    assert coverage.complete


def test_a_long_prompt_in_pages_of_one_token_is_one_run_in_large_frames() -> None:
    """F-K7: the number of pieces follows the bytes, not the pages."""
    num_tokens = 100_000
    shard = Shard(0, 32, 0, 8, 128, "bf16")
    pages = Pages(num_tokens).take(num_tokens)
    assert pages is not None
    assert len(list(runs(pages, 1, 0, num_tokens))) == 1
    frames = plan_frames(shard, 0, num_tokens)
    assert len(frames) <= 1.01 * num_tokens * shard.bytes_per_token / FRAME_BYTES
