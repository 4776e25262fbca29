"""What clients call: Generate and ListModels. One call is one request, from its checks to its last token.

Checks, runs attempts, turns tokens into text, cuts at stop strings, and tells where the time went. Knows no tensor.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from time import monotonic

import grpc
from google.protobuf.duration_pb2 import Duration

from kvmesh.errors import Unavailable
from kvmesh.telemetry import metrics
from kvmesh.text.detokenizer import IncrementalDetokenizer
from kvmesh.text.stops import StopStrings
from kvmesh.text.tokenizer import Tokenizer
from kvmesh.v1 import inference_pb2 as pb
from kvmesh.v1.inference_pb2_grpc import InferenceServiceServicer
from kvmesh.v1.types_pb2 import FINISH_REASON_STOP, FINISH_REASON_UNSPECIFIED, FinishReason, Timing
from services.gateway.attempts import Attempts, Progress
from services.gateway.mesh_view import MeshView
from services.gateway.validation import Limits, Plan, Validator

GenerateContext = grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse]
ListContext = grpc.aio.ServicerContext[pb.ListModelsRequest, pb.ListModelsResponse]


class InferenceServicer(InferenceServiceServicer):
    """The door of the mesh."""

    def __init__(
        self,
        model_name: str,
        max_positions: int,
        tokenizer: Tokenizer,
        validator: Validator,
        view: MeshView,
        attempts: Attempts,
        request_seconds: float,
    ) -> None:
        self._model_name, self._max_positions = model_name, max_positions
        self._tokenizer, self._validator = tokenizer, validator
        self._view, self._attempts = view, attempts
        self._request_seconds = request_seconds
        self._open = 0
        self._draining = False
        self._none_open = asyncio.Event()
        self._none_open.set()

    async def Generate(  # noqa: N802
        self, request: pb.GenerateRequest, context: GenerateContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Streams a completion; see inference.proto for the errors."""
        if self._draining:
            raise Unavailable("this gateway is leaving", reason="draining", retry_after_seconds=1.0)
        arrived = monotonic()
        given = context.time_remaining()
        deadline = arrived + min(given if given is not None else self._request_seconds, self._request_seconds)
        with self._counted():
            plan = await asyncio.to_thread(self._validator.plan, request, self._limits())
            async with aclosing(self._answer(plan, arrived, deadline)) as answer:
                async for response in answer:
                    yield response

    async def finish(self) -> None:
        """Takes nothing new; returns once all that is open is answered."""
        self._draining = True
        await self._none_open.wait()

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self._open += 1
        metrics.REQUESTS_OPEN.set(self._open)
        self._none_open.clear()
        try:
            yield
        finally:
            self._open -= 1
            metrics.REQUESTS_OPEN.set(self._open)
            if self._open == 0:
                self._none_open.set()

    async def ListModels(  # noqa: N802
        self,
        request: pb.ListModelsRequest,  # noqa: ARG002
        context: ListContext,  # noqa: ARG002
    ) -> pb.ListModelsResponse:
        """Names the one model served."""
        model = pb.Model(
            name=self._model_name, max_tokens=self._limits().max_tokens, vocab_size=self._tokenizer.vocab_size
        )
        return pb.ListModelsResponse(models=[model])

    def _limits(self) -> Limits:
        """The mesh's, where it has told; the model's own until then, since a request may wait for a pair."""
        told = self._view.limits
        return Limits(
            max_tokens=min(told.max_tokens or self._max_positions, self._max_positions),
            max_prompt_tokens=min(told.max_prompt_tokens or self._max_positions, self._max_positions - 1),
        )

    async def _answer(self, plan: Plan, arrived: float, deadline: float) -> AsyncGenerator[pb.GenerateResponse, None]:
        progress, text = Progress(), TextOut(self._tokenizer, plan.stops)
        first_token_at = 0.0
        index = 0
        reason: FinishReason.ValueType = FINISH_REASON_UNSPECIFIED
        async with aclosing(self._attempts.tokens(plan, progress, model=self._model_name, deadline=deadline)) as tokens:
            async for new in tokens:
                first_token_at = first_token_at or monotonic()
                piece, used, stopped = text.push(new)
                if stopped or progress.finish_reason != FINISH_REASON_UNSPECIFIED:
                    reason = FINISH_REASON_STOP if stopped else progress.finish_reason
                    piece += "" if stopped else text.flush()
                    yield self._last(plan, progress, index, new[:used], piece, reason, arrived, first_token_at)
                    return
                yield pb.GenerateResponse(
                    index=index, tokens=new, text=piece, seed=plan.sampling.seed if not index else 0
                )
                index += used
        raise Unavailable("the mesh ended the request without its last token", reason="room_lost")

    def _last(
        self,
        plan: Plan,
        progress: Progress,
        index: int,
        tokens: Sequence[int],
        text: str,
        reason: FinishReason.ValueType,
        arrived: float,
        first_token_at: float,
    ) -> pb.GenerateResponse:
        now = monotonic()
        metrics.TIME_TO_FIRST_TOKEN_SECONDS.observe(first_token_at - arrived)
        return pb.GenerateResponse(
            index=index,
            tokens=tokens,
            text=text,
            finish_reason=reason,
            usage=pb.Usage(prompt_tokens=len(plan.prompt), output_tokens=index + len(tokens)),
            timing=_timing(progress, first_token_at - arrived, now - first_token_at),
            seed=plan.sampling.seed if not index else 0,
        )


class TextOut:
    """Tokens to text, up to a stop string."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer)
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

    def flush(self) -> str:
        """What was held back."""
        piece, stopped = self._stops.push(self._detokenizer.flush())
        return piece if stopped else piece + self._stops.flush()


def _timing(progress: Progress, to_first_seconds: float, decode_seconds: float) -> Timing:
    """The parts add up to the time to the first token: `other` is what no part names."""
    parts = {"assign": progress.assign_seconds}
    room = progress.timing
    if room is not None:
        for name in ("reserve", "queue", "prefill", "transfer_tail", "join"):
            parts[name] = getattr(room, name).ToNanoseconds() / 1e9
    parts["other"] = to_first_seconds - sum(parts.values())
    timing = Timing(attempts=progress.attempts)
    parts |= {"time_to_first_token": to_first_seconds, "decode": decode_seconds}
    for name, seconds in parts.items():
        getattr(timing, name).CopyFrom(_duration(seconds))
    return timing


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(max(0, int(seconds * 1e9)))
    return duration
