"""Shared memory between a stage and a decoder: two real processes, and nothing left behind however they end."""

import gc
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvmesh.errors import Corrupt, Unavailable
from kvmesh.kv.frames import HEADER_BYTES, FrameHeader, FrameKind, open_frame, seal
from kvmesh.kv.segment import (
    CELL_BYTES,
    CELL_FRAME_BYTES,
    FreeCells,
    OfferedSegment,
    Segment,
    SegmentOffer,
    offer_segment,
)

ROOT = Path(__file__).parents[3]
JOINS = """
import sys
from kvmesh.kv.frames import FrameHeader, FrameKind, seal
from kvmesh.kv.segment import Segment, SegmentOffer
boot, *numbers = sys.argv[1].split(",")
segment = Segment.join(SegmentOffer(boot, *map(int, numbers)))
for index in range(segment.num_cells):
    frame = seal(FrameHeader(FrameKind.FIRST_TOKEN, room=index + 1), bytes([index]) * 1000)
    segment.cell(index).memory[: len(frame)] = frame
print(len(frame), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def offered() -> Iterator[OfferedSegment]:
    before = open_descriptors()
    segment = OfferedSegment(3)
    yield segment
    segment.close()
    gc.collect()
    assert open_descriptors() == before
    assert not mapped("self")


def open_descriptors() -> int:
    """Of segments."""
    links = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]  # noqa: PTH115
    return sum("kvmesh-kv" in link for link in links)


def mapped(pid: int | str) -> list[str]:
    return [line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "kvmesh-kv" in line]


def stage(offer: SegmentOffer) -> subprocess.Popen[str]:
    """Another process, that joined and wrote a frame into each cell."""
    told = ",".join(map(str, offer))
    process = subprocess.Popen(
        [sys.executable, "-c", JOINS, told], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert int(process.stdout.readline()) == 1064
    return process


def test_what_one_process_sealed_into_a_slot_the_other_opens_in_place(offered: OfferedSegment) -> None:
    joined = stage(offered.offer)
    segment = offered.taken()
    offered.close()
    for index in range(3):
        header, payload = open_frame(segment.cell(index).memory[:1064])
        assert (header.room, bytes(payload)) == (index + 1, bytes([index]) * 1000)
        payload.release()
    joined.communicate()
    del segment


def test_a_killed_stage_leaves_the_decoder_its_memory_and_nothing_else(offered: OfferedSegment) -> None:
    joined = stage(offered.offer)
    segment = offered.taken()
    joined.send_signal(signal.SIGKILL)
    joined.communicate()
    assert open_frame(segment.cell(2).memory[:1064])[0].room == 3
    assert not list(Path("/dev/shm").glob("*kvmesh*"))
    del segment


def test_a_closed_segment_keeps_its_memory_for_as_long_as_a_cell_is_held_and_no_longer(offered: OfferedSegment) -> None:
    """Without a collection of cycles: what has failed is often in one, and a process at rest collects none."""
    gc.disable()
    try:
        segment = offered.taken()
        known = [segment]
        known.append(known)  # type: ignore[arg-type]
        cell = segment.cell(1)
        segment.close()
        segment.close()
        cell.memory[:5] = b"whole"
        assert len(mapped("self")) == 1
        del cell
        assert not mapped("self")
        with pytest.raises(ValueError, match="released"):
            segment.cell(1)
    finally:
        gc.enable()


def test_a_frame_that_was_changed_in_its_slot_is_found_out(offered: OfferedSegment) -> None:
    segment = offered.taken()
    frame = seal(FrameHeader(FrameKind.FIRST_TOKEN, room=1), b"payload")
    memory = segment.cell(0).memory
    memory[: len(frame)] = frame
    memory[len(frame) - 1] ^= 1
    with pytest.raises(Corrupt):
        open_frame(memory[: len(frame)])
    del segment, memory


def test_an_offer_takes_no_memory_until_it_is_taken() -> None:
    offered = OfferedSegment(1024)
    try:
        assert os.fstat(offered.offer.descriptor).st_blocks == 0
    finally:
        offered.close()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"boot_id": "another"}, "another host"),
        ({"pid_namespace": 1}, "another process namespace"),
        ({"pid": 2**22 + 1}, "can't be opened"),
        ({"descriptor": 10_000}, "can't be opened"),
        ({"nonce": 5}, "no segment"),
        ({"num_cells": 4}, "no segment"),
        ({"num_cells": 0}, "no segment"),
        ({"cell_bytes": 1 << 62}, "no segment"),
    ],
)
def test_what_is_not_the_ring_that_was_offered_is_not_joined(
    offered: OfferedSegment, changed: dict[str, int], said: str
) -> None:
    with pytest.raises(Unavailable, match=said):
        Segment.join(offered.offer._replace(**changed))


def test_a_descriptor_of_something_else_is_not_even_opened(offered: OfferedSegment, tmp_path: Path) -> None:
    """Opening a pipe would wait, and a file could be anybody's."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    descriptor = os.open(pipe, os.O_RDWR)
    try:
        with pytest.raises(Unavailable, match="no segment"):
            Segment.join(offered.offer._replace(descriptor=descriptor))
    finally:
        os.close(descriptor)


def test_a_segment_that_could_be_shortened_is_not_joined(offered: OfferedSegment) -> None:
    """Else its maker could take the memory from under the stage, which would die of it."""
    offer = offered.offer
    descriptor = os.memfd_create(f"kvmesh-kv-{offer.nonce:016x}")
    try:
        os.ftruncate(descriptor, offer.num_cells * offer.cell_bytes)
        with pytest.raises(Unavailable, match="no segment"):
            Segment.join(offer._replace(descriptor=descriptor))
    finally:
        os.close(descriptor)


def test_a_slot_that_is_not_there_can_not_be_had(offered: OfferedSegment) -> None:
    segment = offered.taken()
    for index in (-1, 3, 2**32 - 1):
        with pytest.raises(Corrupt, match="cell"):
            segment.cell(index)
    del segment


def test_slots_are_taken_once_and_given_back_once() -> None:
    cells = FreeCells(2)
    first, second = cells.take(), cells.take()
    assert {first, second} == {0, 1}
    assert cells.take() is None
    assert first is not None
    cells.give_back([first])
    assert cells.take() == first, "the cell that was used last is the one that is cached"
    cells.give_back([0, 1])
    for wrong in ([0], [7]):
        with pytest.raises(Corrupt, match="given back"):
            cells.give_back(wrong)


def test_no_ring_is_offered_where_none_is_wanted() -> None:
    assert offer_segment(0) is None


def test_a_slot_holds_a_frame_of_the_planned_size_and_whole_pages() -> None:
    assert CELL_BYTES % mmap.PAGESIZE == 0
    assert CELL_BYTES >= CELL_FRAME_BYTES + HEADER_BYTES
