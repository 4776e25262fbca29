"""KV leaves while its step computes: in the frames of the whole step, whatever a frame is on the link, and each once."""

from dataclasses import replace

import pytest

from kvmesh.kv.layout import FRAME_BYTES, Piece, Shard, WireName, payload_bytes, plan_shards
from kvmesh.protocol.ids import Incarnation, PairingNumber, RoomId
from kvmesh.protocol.sending import Computed
from services.prefill.cutting import Cutter
from services.prefill.filling import Filling

KEY = (Incarnation(3), PairingNumber(1))
WHOLE = Shard(15, 30, 0, 3, 64, "fp32")
"""A stage of smollm2: of 256 tokens five layers fill a frame."""
UNEVEN = [replace(WHOLE, head_begin=0, head_end=2), replace(WHOLE, head_begin=2, head_end=3)]


def span(room: int = 7, begin: int = 0, end: int = 256) -> Computed:
    return Computed(KEY, RoomId(room), begin, end)


def layer_by_layer(cutter: Cutter, of: Computed) -> list[tuple[int, Piece]]:
    """Pieces, each with the first layer that was not computed when it came."""
    pieces = [
        (layer + 1, piece)
        for layer in range(WHOLE.layer_begin, WHOLE.layer_end)
        for piece in cutter.cut(replace(of, layers_end=layer + 1))
    ]
    return pieces + [(WHOLE.layer_end, piece) for piece in cutter.cut(of)]


@pytest.mark.parametrize("num_tokens", [1, 7, 64, 100, 128, 300, 682, 683, 2048])
@pytest.mark.parametrize("wire", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("frame_bytes", [FRAME_BYTES, 4 << 20])
@pytest.mark.parametrize("shards", [[WHOLE], UNEVEN], ids=["whole", "two head shards"])
def test_layer_by_layer_a_step_is_cut_into_the_frames_of_the_whole(
    num_tokens: int, wire: WireName, frame_bytes: int, shards: list[Shard]
) -> None:
    cutter, of = Cutter(shards, wire, frame_bytes), span(begin=11, end=11 + num_tokens)
    came = layer_by_layer(cutter, of)
    expected = plan_shards(shards, 11, 11 + num_tokens, frame_bytes, wire)
    assert sorted(piece for _, piece in came) == sorted(expected)
    assert sorted(piece for piece in Cutter(shards, wire, frame_bytes).cut(of)) == sorted(expected)
    for computed, piece in came:
        assert piece.layer_end <= computed
        earliest = computed == piece.layer_end or piece.layer_end == WHOLE.layer_end
        assert earliest, "a full frame does not wait for more layers"


def test_a_frame_waits_until_it_is_full_or_its_step_is_computed() -> None:
    whole = [(computed, piece[:2]) for computed, piece in layer_by_layer(Cutter([WHOLE], "fp32", FRAME_BYTES), span())]
    assert whole == [(20, (15, 20)), (25, (20, 25)), (30, (25, 30))]
    larger = [(computed, piece[:2]) for computed, piece in layer_by_layer(Cutter([WHOLE], "fp32", 4 << 20), span())]
    assert larger == [(25, (15, 25)), (30, (25, 30))]
    assert payload_bytes("fp32", 10, 3, 256, 64) <= 4 << 20 < payload_bytes("fp32", 11, 3, 256, 64)


def test_chunks_and_rooms_do_not_mix() -> None:
    cutter = Cutter([WHOLE], "fp32", FRAME_BYTES)
    rooms = [span(7, 0, 256), span(8, 0, 256), span(7, 256, 512)]
    for of in rooms:
        assert [p[:4] for p in cutter.cut(replace(of, layers_end=20))] == [(15, 20, of.begin, of.end)]
    for of in rooms:
        assert [p[:4] for p in cutter.cut(of)] == [(15 + 5 * k, 20 + 5 * k, of.begin, of.end) for k in (1, 2)]


def test_a_step_whose_layers_were_never_told_comes_whole() -> None:
    """As on a link that was made in the middle of it."""
    cutter = Cutter([WHOLE], "fp32", FRAME_BYTES)
    assert [p[:2] for p in cutter.cut(replace(span(), layers_end=27))] == [(15, 20), (20, 25)]
    assert [p[:2] for p in cutter.cut(span())] == [(25, 30)]
    assert [p[:2] for p in cutter.cut(span(9))] == [(15, 20), (20, 25), (25, 30)]


def test_the_worker_tells_every_layer_of_what_could_fill_a_frame_and_nothing_of_less() -> None:
    large, small = span(7, 0, 240), span(8, 40, 48)
    assert (small.end - small.begin) * WHOLE.bytes_per_token < FRAME_BYTES
    filling = Filling([large, small], WHOLE)
    told = [filling.layer() for _ in range(WHOLE.num_layers)]
    assert told == [(replace(large, layers_end=layer + 1),) for layer in range(15, 30)]
