"""One answer: tokens become text, text is cut at stop strings, and the last message tells what it took.

Called by the attempts with each batch of new tokens; writes to the client's stream.
"""

from collections.abc import Awaitable, Callable, Sequence
from time import monotonic

from google.protobuf.duration_pb2 import Duration

from kvmesh.telemetry import metrics
from kvmesh.text.detokenizer import IncrementalDetokenizer
from kvmesh.text.stops import StopStrings
from kvmesh.text.tokenizer import Tokenizer
from kvmesh.v1 import inference_pb2 as pb
from kvmesh.v1.types_pb2 import FINISH_REASON_STOP, Timing
from services.gateway.attempts import Progress
from services.gateway.validation import Plan

_ROOM_PARTS = ("reserve", "queue", "prefill", "transfer_tail", "join")
"""What the decoder measures of the time to the first token."""


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
        self._index = 0

    async def deliver(self, tokens: Sequence[int]) -> None:
        """Sends new tokens and the text they complete; with the last token everything that belongs to the end."""
        self._clock(len(tokens))
        text, used, stopped = self._text.push(tokens)
        if stopped:
            self._progress.finish_reason = FINISH_REASON_STOP
        response = pb.GenerateResponse(index=self._index, tokens=tokens[:used])
        if self._index == 0:
            response.seed = self._plan.sampling.seed
        self._index += used
        if self._progress.is_finished:
            text += "" if stopped else self._flush()
            self._close(response)
        response.text = text
        await self._write(response)

    def _clock(self, num_tokens: int) -> None:
        now = monotonic()
        if not self._first_at:
            self._first_at = now
            metrics.TIME_TO_FIRST_TOKEN_SECONDS.observe(now - self._arrived)
        else:
            metrics.TOKEN_GAP_SECONDS.observe((now - self._latest_at) / num_tokens)
        self._latest_at = now

    def _flush(self) -> str:
        text, stopped = self._text.flush()
        if stopped:
            self._progress.finish_reason = FINISH_REASON_STOP
        return text

    def _close(self, response: pb.GenerateResponse) -> None:
        response.finish_reason = self._progress.finish_reason
        response.usage.prompt_tokens, response.usage.output_tokens = len(self._plan.prompt), self._index
        to_first, decode = self._first_at - self._arrived, self._latest_at - self._first_at
        response.timing.CopyFrom(timing(self._progress, to_first, decode))


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


def timing(progress: Progress, to_first_seconds: float, decode_seconds: float) -> Timing:
    """Where the time went. The parts add up to the time to the first token: `other` is what no part names."""
    whole = _nanoseconds(to_first_seconds)
    parts = {"assign": _nanoseconds(progress.assign_seconds)}
    if progress.timing is not None:
        parts |= {name: getattr(progress.timing, name).ToNanoseconds() for name in _ROOM_PARTS}
    parts["other"] = max(0, whole - sum(parts.values()))
    parts |= {"time_to_first_token": whole, "decode": _nanoseconds(decode_seconds)}
    told = Timing(attempts=progress.request.attempts, failed_attempts=progress.request.failures)
    for name, nanoseconds in parts.items():
        getattr(told, name).CopyFrom(_duration(nanoseconds))
    return told


def _nanoseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e9))


def _duration(nanoseconds: int) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(nanoseconds)
    return duration
