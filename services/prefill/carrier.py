"""What bounds the frames of one link, and where they are sealed: bytes in flight on the stream, or free cells of a segment.

Owned by the link's sender, on the event loop.
"""

from collections.abc import Sequence
from typing import Protocol

from kvmesh.errors import Corrupt, Unavailable
from kvmesh.kv.frames import HEADER_BYTES
from kvmesh.kv.layout import FRAME_BYTES, Shard, WireName, payload_bytes
from kvmesh.kv.segment import Cell, FreeCells, Segment, SegmentOffer
from kvmesh.protocol.ids import short
from kvmesh.telemetry import logs
from kvmesh.v1 import prefill_pb2 as pb

log = logs.get(__name__)


class Carrier(Protocol):
    """How KV frames reach the decoder."""

    frame_bytes: int
    """Payload that frames aim at."""

    def take(self, num_bytes: int) -> tuple[bool, Cell | None]:
        """Whether a frame with a payload of that size may be made now, and its cell, where there are cells."""

    def put_back(self, num_bytes: int, cell: Cell | None) -> None:
        """A frame that was allowed came to nothing: its room had ended."""

    def credit(self, num_bytes: int, cells: Sequence[int]) -> None:
        """The decoder is done with so many bytes, or with these cells.

        Raises:
            Corrupt: it had not been given one of the cells, or so many bytes.
        """

    def close(self) -> None:
        """The link is over: nothing more is taken."""


class OnStream:
    """Frames travel on the stream; the window may be overdrawn by one frame, so that any frame gets through."""

    frame_bytes = FRAME_BYTES

    def __init__(self, window_bytes: int) -> None:
        """Args:
        window_bytes: payload that may be in flight before the first credit.
        """
        self._window = self._most = window_bytes

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
        if self._window > self._most:
            raise Corrupt(f"credit for {self._window - self._most} bytes more than were sent", reason="frame")

    def close(self) -> None:
        """See Carrier."""


class InSegment:
    """Frames stand in shared memory; handles travel on the stream."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self.frame_bytes = segment.cell_bytes - HEADER_BYTES
        self._free = FreeCells(segment.num_cells)

    def take(self, num_bytes: int) -> tuple[bool, Cell | None]:  # noqa: ARG002
        """See Carrier."""
        index = self._free.take()
        return (False, None) if index is None else (True, self._segment.cell(index))

    def put_back(self, num_bytes: int, cell: Cell | None) -> None:  # noqa: ARG002
        """See Carrier."""
        if cell is not None:
            self._free.give_back([cell.number])

    def credit(self, num_bytes: int, cells: Sequence[int]) -> None:  # noqa: ARG002
        """See Carrier."""
        self._free.give_back(cells)

    def close(self) -> None:
        """See Carrier."""
        self._segment.close()


def join_segment(hello: pb.LinkHello, shards: Sequence[Shard], wire: WireName) -> Segment | None:
    """The segment that a decoder offers, where it is on this host and can be opened; else its KV goes over the stream.

    Args:
        shards: what the stage sends, in `wire`.
    """
    if not hello.HasField("segment"):
        return None
    offer = hello.segment
    try:
        segment = Segment.join(
            SegmentOffer(
                boot_id=offer.boot_id,
                pid_namespace=offer.pid_namespace,
                pid=offer.pid,
                descriptor=offer.descriptor,
                nonce=offer.nonce,
                num_cells=offer.num_cells,
                cell_bytes=offer.cell_bytes,
            )
        )
    except Unavailable as error:
        log.info("KV for decoder %s goes over the network: %s", short(hello.decoder), error.message)
        return None
    # One token of one layer is not cut.
    least = HEADER_BYTES + max(payload_bytes(wire, 1, shard.num_heads, 1, shard.head_dim) for shard in shards)
    if segment.cell_bytes < least:
        segment.close()
        log.info(
            "KV for decoder %s goes over the network: its cells of %d bytes hold no token of a layer, which takes %d",
            short(hello.decoder),
            segment.cell_bytes,
            least,
        )
        return None
    return segment
