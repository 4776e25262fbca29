"""What stands in cells of a segment, as the decoder takes it; and segments that can't be had."""

import os

import pytest

from kvmesh.errors import Corrupt, Unavailable
from kvmesh.kv.frames import FrameHeader, FrameKind, Handle, seal, seal_handles
from kvmesh.kv.segment import OfferedSegment
from services.decode.link import frames_in
from services.decode.segments import Segments


def handles(*given: tuple[int, int]) -> bytes:
    return seal_handles([Handle(*each) for each in given], pairing=1)


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (handles((3, 100)), "cell 3 of a segment of 2"),
        (handles((0, 5 << 20)), "a frame of 5242880 bytes in a cell of"),
        (handles((0, 70)), "what stands in cell 0 is no KV frame"),
        (handles((1, 70)), "what stands in cell 1 is no KV frame"),
        (handles((0, 10)), "what stands in cell 0 is no KV frame"),
    ],
)
def test_handles_that_name_no_kv_frame_are_refused(message: bytes, says: str) -> None:
    offered = OfferedSegment(2)
    segment = offered.taken()
    offered.close()
    token = seal(FrameHeader(FrameKind.FIRST_TOKEN, room=1, pairing=1), b"eleven")
    segment.cell(0).memory[: len(token)] = token
    with pytest.raises(Corrupt, match=says):
        list(frames_in(segment, message, set()))
    segment.close()


def test_a_cell_is_named_once_until_it_is_given_back() -> None:
    """Else one message could name a cell a million times."""
    offered, lent = OfferedSegment(2), set[int]()
    segment = offered.taken()
    offered.close()
    frame = seal(FrameHeader(FrameKind.KV, 1, 1, 0, 1, 0, 1, 0, 1, 4, "fp32"), bytes(32))
    for number in range(2):
        segment.cell(number).memory[: len(frame)] = frame
    both = handles((0, len(frame)), (1, len(frame)))
    assert [cell.number for cell in frames_in(segment, both, lent)] == [0, 1]
    with pytest.raises(Corrupt, match="cell 1 is named again"):
        list(frames_in(segment, handles((1, len(frame))), lent))
    lent.remove(1)
    assert [cell.number for cell in frames_in(segment, handles((1, len(frame))), lent)] == [1]
    with pytest.raises(Corrupt, match="cell 1 is named again"):
        list(frames_in(segment, handles(*[(1, len(frame))] * 1000), {0}))
    segment.close()


def test_a_segment_that_can_not_be_mapped_ends_one_link_and_none_is_offered_any_more() -> None:
    segments = Segments(2)
    offered = segments.offer()
    assert offered is not None
    os.close(offered.offer.descriptor)  # mapping it fails, as it does where the system refuses
    with pytest.raises(Unavailable, match="can't be mapped"):
        segments.take(offered)
    assert segments.offer() is None
