"""What a stage sends for a step it computed: which tokens' KV, over which pairing; and the fence where it reads a page.

Called by the stage's worker, which copies out of its pages. The applied log alone decides, so all stages send the same.
"""

from dataclasses import dataclass

from kvmesh.protocol.ids import PairingKey, RoomId
from kvmesh.protocol.steps import AppliedLog, RoomOnStage, Step


@dataclass(frozen=True, slots=True)
class Computed:
    """Tokens [begin, end) of a room that its decoder does not have: to be sent over the pairing `key`."""

    key: PairingKey
    room: RoomId
    begin: int
    end: int
    layers_end: int | None = None
    """Of the layers that the stage holds those below this one, a global id; None: all."""


def computed_spans(log: AppliedLog, step: Step) -> tuple[Computed, ...]:
    """What of a step, just applied to `log`, is to be sent once it is computed: its work, less what the decoder has."""
    spans = []
    for work in step.work:
        admitted = log.rooms[work.room].admitted
        if work.end > admitted.cached_len:
            key = (admitted.decoder, admitted.pairing)
            spans.append(Computed(key, work.room, max(work.begin, admitted.cached_len), work.end))
    return tuple(spans)


def readable(log: AppliedLog, key: PairingKey, room: RoomId) -> RoomOnStage | None:
    """The room whose pages may be read for a frame over the pairing `key`; None when it has ended: they may be another's."""
    held = log.rooms.get(room)
    if held is None or (held.admitted.decoder, held.admitted.pairing) != key:
        return None
    return held
