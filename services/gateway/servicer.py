"""What clients call: Generate and ListModels. One call is one request, from its checks to its last token.

Checks, runs attempts, answers; counts what is open. Knows no tensor. Everything a request holds is held by its call: when the
call ends, however it ends, the room ends too.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from time import monotonic

import grpc

from kvmesh.errors import DeadlineExceeded, KvmeshError, Unavailable
from kvmesh.protocol.request import Request
from kvmesh.rpc import streams
from kvmesh.telemetry import metrics, traces
from kvmesh.text.tokenizer import Tokenizer
from kvmesh.v1 import inference_pb2 as pb
from kvmesh.v1.inference_pb2_grpc import InferenceServiceServicer
from services.gateway.answer import Answer
from services.gateway.attempts import Attempts, Progress, after
from services.gateway.mesh_view import MeshView
from services.gateway.validation import Plan, Validator

GenerateContext = grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse]
ListContext = grpc.aio.ServicerContext[pb.ListModelsRequest, pb.ListModelsResponse]


class InferenceServicer(InferenceServiceServicer):
    """The door of the mesh."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        validator: Validator,
        view: MeshView,
        attempts: Attempts,
        *,
        model_name: str,
        request_seconds: float,
        max_attempts: int,
    ) -> None:
        """Args:
        request_seconds: time of a request whose client set no deadline.
        max_attempts: rooms tried for one request.
        """
        self._tokenizer, self._validator = tokenizer, validator
        self._view, self._attempts = view, attempts
        self._model_name, self._request_seconds = model_name, request_seconds
        self._max_attempts = max_attempts
        self._open = 0
        self._draining = False
        self._none_open = asyncio.Event()
        self._none_open.set()

    async def Generate(  # type: ignore[override]  # noqa: N802  # a coroutine that writes: its deadline covers the writes
        self, request: pb.GenerateRequest, context: GenerateContext
    ) -> None:
        """Streams a completion; see inference.proto for the errors."""
        arrived = monotonic()
        left = context.time_remaining()
        seconds = self._request_seconds if left is None else left
        span = traces.start("request", parent=traces.of_call(context.invocation_metadata()), begun=arrived)
        with self._counted(span), span:
            await self._generate(request, context, span, seconds)

    async def ListModels(  # noqa: N802
        self,
        request: pb.ListModelsRequest,  # noqa: ARG002
        context: ListContext,  # noqa: ARG002
    ) -> pb.ListModelsResponse:
        """Names the one model served."""
        if not self._view.limits.max_tokens:
            raise Unavailable("nothing serves a model yet", reason="no_pair", retry_after_seconds=1.0)
        limits = self._validator.limits(self._view.limits)
        model = pb.Model(name=self._model_name, max_tokens=limits.max_tokens, vocab_size=self._tokenizer.vocab_size)
        return pb.ListModelsResponse(models=[model])

    async def finish(self) -> None:
        """Takes nothing new; returns once all that is open is answered."""
        self._draining = True
        await self._none_open.wait()

    async def _generate(
        self,
        request: pb.GenerateRequest,
        context: GenerateContext,
        span: traces.Span,
        seconds: float,
    ) -> None:
        """Served is who got all of it in time, or left with the last of it."""
        failures: list[str] = []
        answer, served = None, False
        try:
            async with asyncio.timeout(seconds):
                plan = await self._plan(request, span)
                progress = Progress(Request(plan.max_output_len, self._max_attempts, failures=failures), span)
                answer = Answer(plan, progress, self._tokenizer, partial(streams.answer, context), span.begun)
                await self._attempts.run(plan, progress, answer.deliver, span.begun + seconds)
            served = True
        except TimeoutError as error:
            lost = f"; {after(failures)}" if failures else ""
            raise DeadlineExceeded(f"the request's {seconds:.3g} s are over{lost}") from error
        except asyncio.CancelledError:
            served = answer is not None and answer.is_whole
            raise
        finally:
            if answer is not None:
                answer.close(served=served)

    async def _plan(self, request: pb.GenerateRequest, span: traces.Span) -> Plan:
        if self._draining:
            raise Unavailable("this gateway is leaving", reason="draining", retry_after_seconds=1.0)
        self._view.check_model()
        limits = self._validator.limits(self._view.limits)
        # Tokenizing a long prompt takes up to a second; tokenizers does it without the GIL.
        with span.child("check"):
            plan = await asyncio.to_thread(self._validator.plan, request, limits)
        metrics.PROMPT_TOKENS.observe(len(plan.prompt))
        return plan

    @contextmanager
    def _counted(self, span: traces.Span) -> Iterator[None]:
        """Counts the request while it is open, and how it ended. One that was cancelled and whose span had ended well was
        served: its client left with the last token."""
        self._open += 1
        self._none_open.clear()
        metrics.REQUESTS_OPEN.set(self._open)
        code = "INTERNAL"
        try:
            yield
            code = "OK"
        except KvmeshError as error:
            code = error.code
            raise
        except asyncio.CancelledError:
            code = "OK" if span.ended and not span.error else "CANCELLED"
            raise
        finally:
            self._open -= 1
            metrics.REQUESTS_OPEN.set(self._open)
            metrics.REQUESTS_TOTAL.labels(code=code).inc()
            if self._open == 0:
                self._none_open.set()
