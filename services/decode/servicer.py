"""What the decoder serves: GenerateRoom. One call is one room; its end, however it comes, ends the room everywhere."""

from collections.abc import AsyncIterator
from time import monotonic

import grpc
from google.protobuf.duration_pb2 import Duration

from kvmesh.errors import Fenced, InvalidInput
from kvmesh.protocol.fence import Fence
from kvmesh.protocol.ids import Generation, RoomId
from kvmesh.telemetry import traces
from kvmesh.v1 import decode_pb2 as pb
from kvmesh.v1.decode_pb2_grpc import DecodeServiceServicer
from kvmesh.v1.types_pb2 import FINISH_REASON_UNSPECIFIED
from services.decode.identity import DecoderIdentity
from services.decode.pairings import Pairings
from services.decode.rooms import LiveRoom, Rooms

GenerateContext = grpc.aio.ServicerContext[pb.GenerateRoomRequest, pb.GenerateRoomResponse]


class DecodeServicer(DecodeServiceServicer):
    """The door to the rooms."""

    def __init__(self, own: DecoderIdentity, fence: Fence, rooms: Rooms, pairings: Pairings) -> None:
        self._own, self._fence, self._rooms, self._pairings = own, fence, rooms, pairings

    async def GenerateRoom(  # noqa: N802
        self,
        request: pb.GenerateRoomRequest,
        context: GenerateContext,
    ) -> AsyncIterator[pb.GenerateRoomResponse]:
        """Streams the room's tokens; see decode.proto for the errors."""
        parent = traces.of_call(context.invocation_metadata())
        with traces.start("room at decoder", parent=parent, room=request.assignment.room) as span:
            self._check(request)
            pairing = self._pairings.require(Generation(request.assignment.generation))
            live = self._rooms.open(request, pairing, span)
            try:
                async for response in _tokens(live):
                    yield response
            finally:
                self._rooms.close(live)

    def _check(self, request: pb.GenerateRoomRequest) -> None:
        """Raises:
        Fenced: meant for another process, or minted in an older term.
        InvalidInput: a field is malformed.
        """
        if request.assignment.decoder.incarnation != self._own.incarnation:
            raise Fenced("meant for another decoder process")
        self._fence.hear_room(RoomId(request.assignment.room))
        vocab_size = self._own.descriptor.vocab_size
        for field in ("prompt", "output_so_far", "stop_ids"):
            if any(token >= vocab_size for token in getattr(request, field)):
                raise InvalidInput(f"a token id is not below the vocabulary's {vocab_size}", field=field)
        if not request.prompt:
            raise InvalidInput("at least one token is needed", field="prompt")
        if request.max_output_len <= len(request.output_so_far):
            raise InvalidInput("must exceed the output so far", field="max_output_len")


async def _tokens(live: LiveRoom) -> AsyncIterator[pb.GenerateRoomResponse]:
    """Tokens as they come, several at once when the reader is slower than the room.

    Raises:
        KvmeshError: why the room ended without its last token.
    """
    index = len(live.request.output_so_far)
    first = True
    while True:
        await live.news.wait()
        live.news.clear()
        tokens, live.tokens = live.tokens, []
        finish_reason, error = (
            live.finish_reason,
            live.error,
        )  # as of these tokens: more may come while they are written
        if tokens:
            response = pb.GenerateRoomResponse(index=index, tokens=tokens, finish_reason=finish_reason)
            if first:
                response.timing.CopyFrom(_timing(live, monotonic()))
                first = False
            index += len(tokens)
            yield response
        if finish_reason != FINISH_REASON_UNSPECIFIED:
            return
        if error is not None:
            raise error


def _timing(live: LiveRoom, now: float) -> pb.RoomTiming:
    """The decoder's parts of the time to first token; they add up to arrival until now."""
    times = live.times
    waited = max(0.0, times.first_token - times.admit_sent)
    queue = min(times.queued_seconds, waited)
    ready = max(times.first_token, times.complete)
    return pb.RoomTiming(
        reserve=_duration(times.admit_sent - times.arrived),
        queue=_duration(queue),
        prefill=_duration(waited - queue),
        transfer_tail=_duration(ready - times.first_token),
        join=_duration(now - ready),
    )


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(max(0, int(seconds * 1e9)))
    return duration
