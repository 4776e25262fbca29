"""How a request ended has one answer: its code, its span and its time agree. And what a client waited for its tokens.

The mesh is played: attempts hand over the tokens a test gives. What the client does, the played stream does.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from kvmesh.errors import DeadlineExceeded, KvmeshError, Unavailable
from kvmesh.telemetry import metrics, traces
from kvmesh.v1 import bootstrap_pb2
from kvmesh.v1 import inference_pb2 as pb
from kvmesh.v1.types_pb2 import FINISH_REASON_LENGTH, Sampling
from services.gateway.attempts import Progress
from services.gateway.servicer import InferenceServicer
from services.gateway.validation import Limits, Plan
from tests.unit.text.tokenizers_made import byte_tokenizer

CODES = ("OK", "CANCELLED", "DEADLINE_EXCEEDED", "UNAVAILABLE", "INTERNAL")
Write = Callable[[pb.GenerateResponse], Awaitable[None]]


class PlayedStream:
    """The stream to a client: takes messages until a test's `write` does otherwise with the last one."""

    def __init__(self, last: Write | None = None, *, is_over: bool = False) -> None:
        self.messages: list[pb.GenerateResponse] = []
        self._last, self._is_over = last, is_over

    def invocation_metadata(self) -> None:
        return None

    def time_remaining(self) -> None:
        return None

    def done(self) -> bool:
        return self._is_over

    async def write(self, message: pb.GenerateResponse) -> None:
        self.messages.append(message)
        if message.finish_reason and self._last is not None:
            await self._last(message)


class PlayedMesh:
    """View and attempts of a mesh that answers with what a test gives."""

    def __init__(self, *batches: Sequence[int], error: KvmeshError | None = None) -> None:
        self._batches, self._error = batches, error
        self.limits = bootstrap_pb2.MeshLimits(max_tokens=100)

    def check_model(self) -> None:
        """It fits."""

    async def run(
        self, plan: Plan, progress: Progress, deliver: Callable[..., Awaitable[None]], deadline: float
    ) -> None:
        for number, tokens in enumerate(self._batches, 1):
            if number == len(self._batches) and self._error is None:
                progress.finish_reason = FINISH_REASON_LENGTH
            await deliver(tokens)
        if self._error is not None:
            raise self._error


class PlayedChecks:
    """A validator that lets everything pass."""

    def limits(self, told: bootstrap_pb2.MeshLimits) -> Limits:
        return Limits(100, 50)

    def plan(self, request: pb.GenerateRequest, limits: Limits) -> Plan:
        return Plan([1, 2], 50, Sampling(), [], list(request.stop), continues=True)


def servicer(mesh: PlayedMesh, *, seconds: float = 30.0) -> InferenceServicer:
    return InferenceServicer(
        byte_tokenizer(),
        PlayedChecks(),  # type: ignore[arg-type]
        mesh,  # type: ignore[arg-type]
        mesh,  # type: ignore[arg-type]
        model_name="bytes",
        request_seconds=seconds,
        max_attempts=3,
    )


async def generate(mesh: PlayedMesh, stream: PlayedStream, *, seconds: float = 30.0, **request: Any) -> None:
    await servicer(mesh, seconds=seconds).Generate(pb.GenerateRequest(**request), stream)  # type: ignore[arg-type]


def sample(name: str, **labels: str) -> float:
    return metrics.page_of("gateway").get_sample_value(name, labels) or 0.0


@contextmanager
def ended(code: str, *, error: str = "") -> Iterator[None]:
    """One request ended inside, so; served by all that tells of it if the code is OK."""
    counted = {c: sample("kvmesh_requests_total", code=c) for c in CODES}
    timed, spans = sample("kvmesh_request_seconds_count"), set(map(id, traces.RING.all()))
    yield
    assert [c for c in CODES if sample("kvmesh_requests_total", code=c) != counted[c]] == [code]
    assert sample("kvmesh_request_seconds_count") - timed == (code == "OK")
    (span,) = [s for s in traces.RING.all() if id(s) not in spans and s.name == "request"]
    assert span.error.partition(":")[0] == error
    assert span.attributes["output_tokens"] == 3
    assert sample("kvmesh_requests_open") == 0


# How a request ended.


async def test_an_answer_that_was_written_is_served() -> None:
    with ended("OK"):
        await generate(PlayedMesh([97], [98, 99]), PlayedStream())


async def never(_: pb.GenerateResponse) -> None:
    await asyncio.Event().wait()


async def test_a_deadline_in_the_last_write_is_a_deadline_everywhere() -> None:
    with ended("DEADLINE_EXCEEDED", error="deadline"), pytest.raises(DeadlineExceeded):
        await generate(PlayedMesh([97], [98, 99]), PlayedStream(never), seconds=0.05)


async def test_a_client_that_hangs_up_with_the_last_token_was_served() -> None:
    writing = asyncio.Event()

    async def hang_up(message: pb.GenerateResponse) -> None:
        writing.set()
        await never(message)

    with ended("OK"):
        call = asyncio.ensure_future(generate(PlayedMesh([97], [98, 99]), PlayedStream(hang_up)))
        await writing.wait()
        call.cancel()
        await asyncio.wait([call])
    assert call.cancelled()


def fails(error: Exception) -> Write:
    async def write(_: pb.GenerateResponse) -> None:
        raise error

    return write


GONE = [grpc.aio.InternalError("failed to send"), grpc.aio.UsageError("the call is over")]


@pytest.mark.parametrize("error", GONE, ids=lambda error: type(error).__name__)
async def test_a_write_that_finds_its_client_gone_is_a_client_that_left(error: Exception) -> None:
    with ended("OK"), pytest.raises(asyncio.CancelledError):
        await generate(PlayedMesh([97], [98, 99]), PlayedStream(fails(error), is_over=True))

    class GoneEarly(PlayedStream):
        async def write(self, message: pb.GenerateResponse) -> None:
            self.messages.append(message)
            if len(self.messages) == 2:
                raise error

    with ended("CANCELLED", error="cancelled"), pytest.raises(asyncio.CancelledError):
        await generate(PlayedMesh([97], [98, 99], [100]), GoneEarly(is_over=True))


async def test_a_misuse_of_a_call_that_lives_is_a_bug() -> None:
    stream = PlayedStream(fails(grpc.aio.UsageError("twice")))
    with ended("INTERNAL", error="UsageError"), pytest.raises(grpc.aio.UsageError):
        await generate(PlayedMesh([97], [98, 99]), stream)


async def test_a_mesh_that_fails_after_some_tokens_served_nobody() -> None:
    with ended("UNAVAILABLE", error="unavailable"), pytest.raises(Unavailable):
        await generate(PlayedMesh([97], [98, 99], error=Unavailable("lost")), PlayedStream())


# What its client waited for the tokens.


@contextmanager
def gaps(*wanted: bool) -> Iterator[None]:
    """As many samples as tokens followed the first; true for those that were waited for."""
    name = "kvmesh_token_gap_seconds"
    count, zeros = sample(f"{name}_count"), sample(f"{name}_bucket", le="0.001")
    yield
    assert sample(f"{name}_count") - count == len(wanted)
    assert sample(f"{name}_bucket", le="0.001") - zeros == wanted.count(False)


async def late(mesh: PlayedMesh, monkeypatch: pytest.MonkeyPatch, **request: Any) -> None:
    """Each batch comes a second after the one before."""
    now = iter(range(1_000_000, 2_000_000))
    monkeypatch.setattr("services.gateway.answer.monotonic", lambda: float(next(now)))
    await generate(mesh, PlayedStream(), **request)


async def test_each_token_is_a_sample_and_those_that_come_together_waited_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with gaps(False, True, True, False, False):
        await late(PlayedMesh([97, 98], [99], [100, 101, 102]), monkeypatch)


async def test_tokens_behind_a_stop_string_are_no_tokens_of_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    with gaps(True):
        await late(PlayedMesh([97], list(b"bcd")), monkeypatch, stop=["b"])
