"""One answer: tokens become text, text is cut at stop strings, and the last message tells what it took.

Called by the attempts with each batch of new tokens; writes to the client's stream.
"""

from collections.abc import Awaitable, Callable, Sequence
from time import monotonic

from google.protobuf.duration_pb2 import Duration

from kvmesh.protocol.ids import short
from kvmesh.telemetry import metrics
from kvmesh.text.detokenizer import IncrementalDetokenizer
from kvmesh.text.stops import StopStrings
from kvmesh.text.tokenizer import Tokenizer
from kvmesh.v1 import inference_pb2 as pb
from kvmesh.v1.types_pb2 import FINISH_REASON_STOP, Timing
from services.gateway.attempts import Progress
from services.gateway.validation import Plan

_ROOM_PARTS = metrics.FIRST_TOKEN_PARTS[1:-1]
"""What the decoder measures of the time to the first token; assign and other are the gateway's own."""


class Answer:
    """The output of one request on its way to the client."""

    def __init__(
        self,
        plan: Plan,
        progress: Progress,
        tokenizer: Tokenizer,
        write: Callable[[pb.GenerateResponse], Awaitable[None]],
        arrived: float,
    ) -> None:
        """Args:
        progress: its finish reason is set here when a stop string appears.
        write: to the client; returns when the stream has taken it.
        arrived: when the request came, on the monotonic clock.
        """
        self._plan, self._progress, self._write = plan, progress, write
        self._text = TextOut(tokenizer, plan.stops, continues=plan.continues)
        self._arrived = arrived
        self._first_at = self._latest_at = 0.0
        self._parts: dict[str, int] = {}
        self._index = 0
        self.is_whole = False
        """All of it is with the stream, or on its way there: a client that leaves from now on was served."""

    def close(self, *, served: bool) -> None:
        """The request is over, however: what its client saw of it."""
        request = self._progress.span
        metrics.OUTPUT_TOKENS.observe(self._index)
        request.attributes |= {"prompt_tokens": len(self._plan.prompt), "output_tokens": self._index}
        request.attributes["attempts"] = self._progress.request.attempts
        if self._first_at:
            span = request.child("answer", begun=self._first_at)
            span.attributes["tokens"] = self._index
            span.end(ended=self._latest_at)
        if served:
            metrics.REQUEST_SECONDS.observe(monotonic() - self._arrived, self._exemplar)
            request.end()

    async def deliver(self, tokens: Sequence[int]) -> None:
        """Sends new tokens and the text they complete; with the last token everything that belongs to the end."""
        now = monotonic()
        text, used, stopped = self._text.push(tokens)
        self._clock(now, used)
        if stopped:
            self._progress.finish_reason = FINISH_REASON_STOP
        response = pb.GenerateResponse(index=self._index, tokens=tokens[:used])
        if self._index == 0:
            response.seed = self._plan.sampling.seed
        self._index += used
        if self._progress.is_finished:
            text += "" if stopped else self._flush()
            self._finish(response)
            self.is_whole = True
        response.text = text
        await self._write(response)

    def _clock(self, now: float, num_tokens: int) -> None:
        """Tokens came. Of several together the first was waited for, and the others came with it."""
        if not self._first_at:
            self._first_at = now
            self._parts = parts(self._progress, now - self._arrived)
            metrics.TIME_TO_FIRST_TOKEN_SECONDS.observe(now - self._arrived, self._exemplar)
            for part, nanoseconds in self._parts.items():
                metrics.TIME_TO_FIRST_TOKEN_PART_SECONDS.labels(part=part).observe(nanoseconds / 1e9)
        else:
            metrics.TOKEN_GAP_SECONDS.observe(now - self._latest_at)
        for _ in range(num_tokens - 1):
            metrics.TOKEN_GAP_SECONDS.observe(0.0)
        self._latest_at = now

    @property
    def _exemplar(self) -> dict[str, str] | None:
        """Ties a slow request to its room and its trace."""
        room, trace_id = self._progress.room, self._progress.span.context.trace_id
        return {"room": short(room), "trace_id": f"{trace_id:032x}"} if room is not None else None

    def _flush(self) -> str:
        text, stopped = self._text.flush()
        if stopped:
            self._progress.finish_reason = FINISH_REASON_STOP
        return text

    def _finish(self, response: pb.GenerateResponse) -> None:
        response.finish_reason = self._progress.finish_reason
        response.usage.prompt_tokens, response.usage.output_tokens = len(self._plan.prompt), self._index
        response.timing.CopyFrom(timing(self._progress, self._parts, self._latest_at - self._first_at))


class TextOut:
    """Tokens to text, up to a stop string."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], *, continues: bool) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, continues=continues)
        self._stops = StopStrings(stops)

    def push(self, tokens: Sequence[int]) -> tuple[str, int, bool]:
        """Text that these tokens completed, how many of them were used, and whether a stop string ended it."""
        text = ""
        for count, token in enumerate(tokens, 1):
            piece, stopped = self._stops.push(self._detokenizer.push([token]))
            text += piece
            if stopped:
                return text, count, True
        return text, len(tokens), False

    def flush(self) -> tuple[str, bool]:
        """What was held back, and whether a stop string ended even that."""
        piece, stopped = self._stops.push(self._detokenizer.flush())
        return (piece, True) if stopped else (piece + self._stops.flush(), False)


def parts(progress: Progress, to_first_seconds: float) -> dict[str, int]:
    """Where the time to the first token went, in nanoseconds by part. They add up to it: `other` is what no part names."""
    split = {"assign": _nanoseconds(progress.assign_seconds)}
    if progress.timing is not None:
        split |= {name: getattr(progress.timing, name).ToNanoseconds() for name in _ROOM_PARTS}
    split["other"] = max(0, _nanoseconds(to_first_seconds) - sum(split.values()))
    return split


def timing(progress: Progress, split: dict[str, int], decode_seconds: float) -> Timing:
    """What the client is told of the time: the parts, their sum, and the rest of the answer."""
    told = Timing(
        attempts=progress.request.attempts, failed_attempts=progress.request.failures, room=progress.room or 0
    )
    whole = {"time_to_first_token": sum(split.values()), "decode": _nanoseconds(decode_seconds)}
    for name, nanoseconds in (split | whole).items():
        getattr(told, name).CopyFrom(_duration(nanoseconds))
    return told


def _nanoseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e9))


def _duration(nanoseconds: int) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(nanoseconds)
    return duration
