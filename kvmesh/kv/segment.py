"""Shared memory between one stage and one decoder of a host: cells that hold sealed frames, so that gRPC carries only handles.

The decoder makes a segment for each link and offers it in HELLO; a stage that can open it seals its KV frames straight into
free cells. A cell is credit: the stage writes it until its handle is sent, the decoder reads it until it gave it back. In a
cell stands the same frame that would have gone over the wire; it is verified and written to pages in the same way, and no page
is ever shared. The segment is a memfd: it has no name that could be left behind, and ends with the last process that maps it,
however that dies. It is sealed against resizing, so neither side can take memory from under the other. Knows no room.
"""

import contextlib
import fcntl
import mmap
import os
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from kvmesh.errors import Corrupt, Unavailable

CELL_FRAME_BYTES = 4 << 20
"""Payload that a frame in a cell aims at. What a frame costs beside its bytes counts for more here than on a stream: with half
of it KV moves 0.87 times as fast, with twice as much no faster."""
CELL_BYTES = CELL_FRAME_BYTES + mmap.PAGESIZE
"""Such a frame, its header, and a whole number of pages."""
MAX_SEGMENT_BYTES = 4 << 30
"""What a stage maps at most of a decoder's memory."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PID_NAMESPACE = Path("/proc/self/ns/pid")


class SegmentOffer(NamedTuple):
    """Where a segment is to be found: all that a process of the same host and process namespace needs."""

    boot_id: str
    pid_namespace: int
    pid: int
    descriptor: int
    nonce: int
    num_cells: int
    cell_bytes: int


class Cell(NamedTuple):
    """One cell and its memory."""

    number: int
    memory: memoryview


class Segment:
    """A mapped segment: use `OfferedSegment.taken` or `join`. Closed, its memory goes with the last cell somebody holds."""

    def __init__(self, descriptor: int, num_cells: int, cell_bytes: int) -> None:
        """Args:
        descriptor: of the segment; the mapping keeps one of its own.
        """
        self.num_cells, self.cell_bytes = num_cells, cell_bytes
        size = num_cells * cell_bytes
        # Not populated: that takes the event loop's time. A cell's pages are mapped when threads first copy to it and from it.
        self._memory = memoryview(mmap.mmap(descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE))

    def cell(self, index: int) -> Cell:
        """Cell `index`.

        Raises:
            Corrupt: there is none.
        """
        if not 0 <= index < self.num_cells:
            raise Corrupt(f"cell {index} of a segment of {self.num_cells}", reason="frame")
        begin = index * self.cell_bytes
        return Cell(index, self._memory[begin : begin + self.cell_bytes])

    def close(self) -> None:
        """No more cells can be had. Repeated: nothing.

        Whoever knows the segment may be remembered for long, in the traceback of what ended the stream.
        """
        self._memory.release()

    @classmethod
    def join(cls, offer: SegmentOffer) -> "Segment":
        """The stage's side.

        Raises:
            Unavailable: the segment is out of reach (another host, another process namespace, another user), or is not what was
                offered; the message says which.
        """
        try:
            here = (_boot_id(), _pid_namespace())
        except OSError as error:
            raise Unavailable(f"this host does not say which it is: {error}") from error
        if (offer.boot_id, offer.pid_namespace) != here:
            raise Unavailable("the decoder runs on another host or in another process namespace")
        size = offer.num_cells * offer.cell_bytes
        if not (
            offer.num_cells > 0
            and offer.cell_bytes > 0
            and offer.cell_bytes % mmap.PAGESIZE == 0
            and size <= MAX_SEGMENT_BYTES
        ):
            raise Unavailable(f"{offer.num_cells} cells of {offer.cell_bytes} bytes are no segment")
        path = _descriptors(offer.pid) / str(offer.descriptor)
        named = f"/memfd:{_name(offer.nonce)} (deleted)"
        try:
            if str(path.readlink()) != named:  # asked before it is opened: opening some files has effects
                raise Unavailable("the descriptor offered is no segment")
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise Unavailable(f"the segment can't be opened: {error.strerror}") from error
        try:
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
            if (
                str((_descriptors("self") / str(descriptor)).readlink()) != named
                or seals & fcntl.F_SEAL_SHRINK == 0
                or os.fstat(descriptor).st_size != size
            ):
                raise Unavailable("the segment offered is no segment")
            return cls(descriptor, offer.num_cells, offer.cell_bytes)
        except OSError as error:
            raise Unavailable(f"the segment can't be mapped: {error.strerror}") from error
        finally:
            os.close(descriptor)


class OfferedSegment:
    """A segment that a decoder made and no stage has taken yet; it takes no memory until then."""

    def __init__(self, num_cells: int, cell_bytes: int = CELL_BYTES) -> None:
        """Raises:
        OSError: the system has no such memory to give.
        """
        nonce = secrets.randbits(63) | 1
        self._descriptor = os.memfd_create(_name(nonce), os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._descriptor, num_cells * cell_bytes)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, seals)
            self.offer = SegmentOffer(
                _boot_id(), _pid_namespace(), os.getpid(), self._descriptor, nonce, num_cells, cell_bytes
            )
        except OSError:
            self.close()
            raise

    def taken(self) -> Segment:
        """The stage joined: the decoder's side of the segment."""
        return Segment(self._descriptor, self.offer.num_cells, self.offer.cell_bytes)

    def close(self) -> None:
        """Nobody can join any more; who joined keeps it. Repeated: nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class FreeCells:
    """The stage's books of a segment: the cells it may write. The last one given back is the next to be used: it is cached."""

    def __init__(self, num_cells: int) -> None:
        self._free = list(reversed(range(num_cells)))
        self._lent: set[int] = set()

    def take(self) -> int | None:
        """A cell to write; None when the decoder has them all."""
        if not self._free:
            return None
        self._lent.add(index := self._free.pop())
        return index

    def give_back(self, indices: Iterable[int]) -> None:
        """The decoder is done with them, or they were not needed.

        Raises:
            Corrupt: one was not taken.
        """
        for index in indices:
            if index not in self._lent:
                raise Corrupt(f"cell {index} was given back and had not been taken", reason="frame")
            self._lent.remove(index)
            self._free.append(index)


def offer_segment(num_cells: int) -> OfferedSegment | None:
    """A segment to offer; None where there is no such memory, or none is wanted."""
    if num_cells < 1 or not hasattr(os, "memfd_create"):
        return None
    with contextlib.suppress(OSError):
        return OfferedSegment(num_cells)
    return None


def _descriptors(pid: int | str) -> Path:
    return Path(f"/proc/{pid}/fd")


def _name(nonce: int) -> str:
    return f"kvmesh-kv-{nonce:016x}"


def _boot_id() -> str:
    return _BOOT_ID.read_text().strip()


def _pid_namespace() -> int:
    return _PID_NAMESPACE.stat().st_ino
