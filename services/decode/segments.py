"""The shared memory that a decoder offers stages of its host. Called by links when they greet; on the event loop."""

from kvmesh.errors import Unavailable
from kvmesh.kv.segment import OfferedSegment, Segment, offer_segment
from kvmesh.telemetry import logs

log = logs.get(__name__)


class Segments:
    """What is offered to the next stage."""

    def __init__(self, num_cells: int) -> None:
        """Args:
        num_cells: for each stage; 0: none.
        """
        self._num_cells = num_cells

    def offer(self) -> OfferedSegment | None:
        """A segment to offer; None where there is none to give."""
        return offer_segment(self._num_cells)

    def take(self, offered: OfferedSegment) -> Segment:
        """The stage joined: this side of the segment. Where it can't be mapped, none is offered any more: the stage sends
        nowhere else on this link, but on the next.

        Raises:
            Unavailable: this link is of no use.
        """
        try:
            return offered.taken()
        except OSError as error:
            self._num_cells = 0
            log.warning("no more shared memory is offered: a segment can't be mapped: %s", error.strerror)
            raise Unavailable(f"a segment can't be mapped: {error.strerror}", reason="link_lost") from error
