"""What bounds the frames of one link, and where they are sealed: bytes in flight on the stream, or free cells of a segment.

Owned by the link's sender, on the event loop.
"""

from collections.abc import Sequence
from typing import Protocol

from kvmesh.kv.frames import HEADER_BYTES
from kvmesh.kv.layout import Shard
from kvmesh.kv.segment import Cell, FreeCells, Segment


class Carrier(Protocol):
    """How KV frames reach the decoder."""

    def take(self, num_bytes: int) -> tuple[bool, Cell | None]:
        """Whether a frame with a payload of that size may be made now, and its cell, where there are cells."""

    def put_back(self, num_bytes: int, cell: Cell | None) -> None:
        """A frame that was allowed came to nothing: its room had ended."""

    def credit(self, num_bytes: int, cells: Sequence[int]) -> None:
        """The decoder is done with so many bytes, or with these cells.

        Raises:
            Corrupt: it had not been given one of the cells.
        """


class OnStream:
    """Frames travel on the stream; the window may be overdrawn by one frame, so that any frame gets through."""

    def __init__(self, window_bytes: int) -> None:
        """Args:
        window_bytes: payload that may be in flight before the first credit.
        """
        self._window = window_bytes

    def take(self, num_bytes: int) -> tuple[bool, Cell | None]:
        """See Carrier."""
        if self._window <= 0:
            return False, None
        self._window -= num_bytes
        return True, None

    def put_back(self, num_bytes: int, cell: Cell | None) -> None:  # noqa: ARG002
        """See Carrier."""
        self._window += num_bytes

    def credit(self, num_bytes: int, cells: Sequence[int]) -> None:  # noqa: ARG002
        """See Carrier."""
        self._window += num_bytes


class InSegment:
    """Frames stand in shared memory; handles travel on the stream."""

    def __init__(self, segment: Segment) -> None:
        self._ring = segment
        self._free = FreeCells(segment.num_cells)

    def take(self, num_bytes: int) -> tuple[bool, Cell | None]:  # noqa: ARG002
        """See Carrier."""
        index = self._free.take()
        return (False, None) if index is None else (True, self._ring.cell(index))

    def put_back(self, num_bytes: int, cell: Cell | None) -> None:  # noqa: ARG002
        """See Carrier."""
        if cell is not None:
            self._free.give_back([cell.number])

    def credit(self, num_bytes: int, cells: Sequence[int]) -> None:  # noqa: ARG002
        """See Carrier."""
        self._free.give_back(cells)


def fits(segment: Segment, shard: Shard) -> bool:
    """Whether the largest frame there can be, one token of one layer if that is large, has room in a cell."""
    return shard.layer_bytes_per_token + HEADER_BYTES <= segment.cell_bytes
