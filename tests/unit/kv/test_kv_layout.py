"""Shards, pieces and runs: every range of layers x tokens is covered exactly once, whatever the sizes."""

import itertools
from dataclasses import replace

import pytest

from kvmesh.errors import Misfit
from kvmesh.kv.layout import DTypeName, Shard, WireName, payload_bytes, plan_frames, plan_shards, runs, wire_between

SHARD = Shard(layer_begin=4, layer_end=9, head_begin=0, head_end=2, head_dim=8, dtype="bf16")


def test_bytes_per_token_count_k_and_v_of_all_layers_and_heads() -> None:
    assert SHARD.bytes_per_token == 5 * 2 * 2 * 8 * 2


@pytest.mark.parametrize("frame_bytes", [1, 64, 65, 640, 1000, 6400, 1 << 20])
@pytest.mark.parametrize("tokens", [(0, 1), (3, 4), (5, 18), (0, 100)])
def test_pieces_tile_layers_and_tokens_exactly(frame_bytes: int, tokens: tuple[int, int]) -> None:
    pieces = plan_frames(SHARD, *tokens, frame_bytes)
    covered = [cell for p in pieces for cell in itertools.product(range(p.layer_begin, p.layer_end), range(*p[2:4]))]
    assert sorted(covered) == list(itertools.product(range(4, 9), range(*tokens)))


@pytest.mark.parametrize("frame_bytes", [64, 640, 1000, 6400])
def test_no_piece_is_larger_than_a_frame(frame_bytes: int) -> None:
    for piece in plan_frames(SHARD, 0, 100, frame_bytes):
        layers, tokens = piece.layer_end - piece.layer_begin, piece.token_end - piece.token_begin
        assert layers * tokens * SHARD.layer_bytes_per_token <= frame_bytes


def test_layers_share_a_frame_when_they_fit_and_tokens_are_split_only_when_one_layer_does_not() -> None:
    assert [p[:2] for p in plan_frames(SHARD, 0, 10, 64 * 10 * 2)] == [(4, 6), (6, 8), (8, 9)]
    assert [p[2:4] for p in plan_frames(SHARD, 0, 10, 64 * 4)] == [(0, 4), (4, 8), (8, 10)] * 5


def test_pieces_come_by_layer_first() -> None:
    layers = [p.layer_begin for p in plan_frames(SHARD, 0, 100, 1000)]
    assert layers == sorted(layers)


def test_an_empty_range_has_no_pieces() -> None:
    assert plan_frames(SHARD, 5, 5) == []


def test_runs_join_adjacent_pages_only() -> None:
    assert list(runs([7, 8, 2, 3], 4, 1, 15)) == [(29, 1, 7), (8, 8, 7)]
    assert list(runs([1, 0], 4, 0, 8)) == [(4, 0, 4), (0, 4, 4)]


def test_a_run_ends_with_the_range_and_not_with_its_page() -> None:
    assert list(runs([5, 6], 4, 2, 5)) == [(22, 2, 3)]
    assert list(runs([5], 4, 1, 3)) == [(21, 1, 2)]


def test_runs_past_the_last_page_are_refused() -> None:
    with pytest.raises(IndexError):
        list(runs([5], 4, 0, 5))


def test_the_narrower_format_travels_and_of_equals_the_stages() -> None:
    narrow: tuple[DTypeName, ...] = ("bf16", "fp16")
    assert wire_between("fp32", "fp32") == "fp32"
    for name in narrow:
        assert wire_between("fp32", name) == wire_between(name, "fp32") == name
    assert (wire_between("bf16", "fp16"), wire_between("fp16", "bf16")) == ("bf16", "fp16")
    assert (wire_between("bf16", "fp32", "int8"), wire_between("fp32", "fp16", "fp8")) == ("int8", "fp8")


@pytest.mark.parametrize("asked", ["int4", "bf16", ""])
def test_a_format_that_no_stage_sends_is_a_misfit(asked: str) -> None:
    with pytest.raises(Misfit, match="kv_wire: decoder asks for"):
        wire_between("fp32", "fp32", asked)


@pytest.mark.parametrize("wire", ["int8", "fp8", "bf16"])
@pytest.mark.parametrize("frame_bytes", [1, 700, 5000, 1 << 20])
def test_pieces_tile_and_fit_as_they_travel(wire: WireName, frame_bytes: int) -> None:
    pieces = plan_frames(SHARD, 3, 150, frame_bytes, wire)
    covered = [cell for p in pieces for cell in itertools.product(range(p.layer_begin, p.layer_end), range(*p[2:4]))]
    assert sorted(covered) == list(itertools.product(range(4, 9), range(3, 150)))
    for p in pieces:
        size = payload_bytes(wire, p.layer_end - p.layer_begin, 2, p.token_end - p.token_begin, 8)
        assert size <= frame_bytes or p.token_end - p.token_begin == 1


def test_shards_of_heads_come_together_by_layer() -> None:
    shards = [replace(SHARD, head_begin=0, head_end=1), replace(SHARD, head_begin=1, head_end=4)]
    pieces = plan_shards(shards, 0, 40, 1000)
    assert [p.layer_end for p in pieces] == sorted(p.layer_end for p in pieces)
    assert {p.heads for p in pieces} == {(0, 1), (1, 4)}
