"""The bytes on a link: what was sealed opens again, what was damaged does not."""

import struct
from dataclasses import replace

import pytest
import xxhash

from kvmesh.errors import Corrupt
from kvmesh.kv.frames import HEADER_BYTES, FrameHeader, FrameKind, allocate, open_frame, seal, seal_into

KV = FrameHeader(
    kind=FrameKind.KV,
    room=(3 << 40) | 5,
    pairing=2**63,
    layer_begin=15,
    layer_end=17,
    head_begin=1,
    head_end=3,
    token_begin=100_000,
    token_end=100_003,
    head_dim=4,
    dtype="bf16",
)
PAYLOAD = bytes(range(96)) * 2


def test_a_sealed_frame_opens_to_the_same_header_and_payload() -> None:
    header, payload = open_frame(seal(KV, PAYLOAD))
    assert header == replace(KV, payload_bytes=192)
    assert bytes(payload) == PAYLOAD


def test_messages_without_kv_carry_any_payload() -> None:
    for kind in (FrameKind.HELLO, FrameKind.WELCOME, FrameKind.FIRST_TOKEN):
        header, payload = open_frame(seal(FrameHeader(kind, room=9), b"abc"))
        assert (header.kind, header.room, header.dtype, bytes(payload)) == (kind, 9, None, b"abc")


def test_a_credit_is_a_header_alone() -> None:
    message = seal(FrameHeader(FrameKind.CREDIT, credit_bytes=2**32 - 1))
    assert len(message) == HEADER_BYTES
    assert open_frame(message)[0].credit_bytes == 2**32 - 1


def test_the_layout_is_the_documented_one() -> None:
    message = seal(KV, PAYLOAD)
    assert message[:7] == b"KVMF\x02\x03\x02"
    assert struct.unpack_from("<QQ", message, 16) == (KV.room, KV.pairing)
    assert struct.unpack_from("<4H2IH", message, 32) == (15, 17, 1, 3, 100_000, 100_003, 4)
    assert struct.unpack_from("<2I", message, 52) == (192, 0)


def test_any_flipped_bit_is_seen() -> None:
    message = seal(KV, PAYLOAD)
    for bit in range(8 * len(message)):
        damaged = bytearray(message)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Corrupt):
            open_frame(damaged)


def test_any_cut_is_seen() -> None:
    message = seal(KV, PAYLOAD)
    for length in range(len(message)):
        with pytest.raises(Corrupt):
            open_frame(message[:length])


def test_bytes_too_many_are_seen() -> None:
    with pytest.raises(Corrupt, match="192 bytes of payload and has 193"):
        open_frame(seal(KV, PAYLOAD) + b"\0")


@pytest.mark.parametrize(
    "broken",
    [
        replace(KV, token_end=100_004),
        replace(KV, layer_end=15),
        replace(KV, layer_begin=18, head_begin=4),
        replace(KV, dtype="fp32"),
        replace(KV, dtype=None),
        replace(KV, head_dim=0),
    ],
)
def test_a_kv_header_that_contradicts_its_payload_is_refused(broken: FrameHeader) -> None:
    with pytest.raises(Corrupt, match="KV frame of shape"):
        open_frame(seal(broken, PAYLOAD))


@pytest.mark.parametrize(("offset", "value", "said"), [(4, 1, "version 1"), (5, 9, "kind 9"), (6, 7, "dtype 7")])
def test_a_well_sealed_frame_of_another_make_is_refused(offset: int, value: int, said: str) -> None:
    message, view = allocate(len(PAYLOAD))
    view[HEADER_BYTES:] = PAYLOAD
    seal_into(view, KV)
    view[offset] = value
    view[8:16] = bytes(8)
    from_scratch = bytearray(view)
    del view
    from_scratch[8:16] = xxh3(from_scratch)
    with pytest.raises(Corrupt, match=said):
        open_frame(from_scratch)
    assert len(message) == HEADER_BYTES + len(PAYLOAD)


def xxh3(message: bytearray) -> bytes:

    return xxhash.xxh3_64(message).intdigest().to_bytes(8, "little")


def test_a_field_out_of_range_can_not_be_sealed() -> None:
    with pytest.raises(struct.error):
        seal(replace(KV, layer_end=2**16), PAYLOAD)
