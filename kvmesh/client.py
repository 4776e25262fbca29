"""The Python client of a mesh: streams completions from a gateway.

    async with Client("127.0.0.1:7070") as client:
        async for piece in client.generate(messages=[{"role": "user", "content": "Why is the sky blue?"}]):
            print(piece.text, end="", flush=True)

Called by the command line, benches and anyone's program. Knows contracts and channels, and nothing of what serves them.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

from kvmesh.errors import InvalidInput, Unavailable
from kvmesh.rpc.channels import dial
from kvmesh.rpc.status import peer_errors
from kvmesh.v1 import inference_pb2 as pb
from kvmesh.v1.inference_pb2_grpc import InferenceServiceStub
from kvmesh.v1.types_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_UNSPECIFIED, Timing

TIMING_PARTS = ("assign", "reserve", "queue", "prefill", "transfer_tail", "join", "other")
"""What the time to the first token is made of; see types.proto."""


@dataclass(frozen=True, slots=True)
class End:
    """How a completion ended and what it took."""

    finish_reason: str
    """"stop" or "length"."""
    prompt_tokens: int
    output_tokens: int
    time_to_first_token_seconds: float
    parts_seconds: Mapping[str, float]
    """By TIMING_PARTS; they add up to the time to the first token."""
    decode_seconds: float
    """First token until last."""
    attempts: int
    """Rooms it took; 1 for an undisturbed request."""
    room: int = 0
    """The room of the last token: what `kvmesh trace` knows the request by."""
    failed_attempts: Sequence[str] = ()
    """Why those before the last failed: one stable reason each."""

    @property
    def decode_tokens_per_second(self) -> float:
        """Rate after the first token; 0 where there was none."""
        return (self.output_tokens - 1) / self.decode_seconds if self.decode_seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Piece:
    """Some of a completion. All texts joined are the whole text."""

    index: int
    """Of the first token here, in the output."""
    tokens: Sequence[int]
    text: str
    seed: int | None
    """What drew the tokens; in the first piece."""
    end: End | None
    """In the last piece."""


class Client:
    """A connection to one gateway. Use as `async with`, or `close` it."""

    def __init__(self, address: str) -> None:
        """Args:
        address: host:port of the gateway.
        """
        self._channel = dial(address, resend_unsent=True)
        self._stub = InferenceServiceStub(self._channel)

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends the connection and every completion that still streams on it."""
        await self._channel.close()

    async def models(self, *, timeout_seconds: float = 10.0) -> Sequence[pb.Model]:
        """The models served and their limits.

        Raises:
            KvmeshError: see ListModels in inference.proto.
        """
        with peer_errors("the gateway"):
            response = await self._stub.ListModels(pb.ListModelsRequest(), timeout=timeout_seconds)
        return list(response.models)

    async def generate(
        self,
        *,
        prompt: str | None = None,
        messages: Sequence[Mapping[str, str]] | None = None,
        tokens: Sequence[int] | None = None,
        model: str = "",
        max_output_tokens: int = 0,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int | None = None,
        stop: Sequence[str] = (),
        stop_ids: Sequence[int] = (),
        ignore_eos: bool = False,
        timeout_seconds: float | None = None,
    ) -> AsyncIterator[Piece]:
        """Stream a completion. Leaving the loop early, or cancelling the task, ends it everywhere.

        Args:
            prompt: text to go on from.
            messages: a conversation instead, each with "role" and "content".
            tokens: token ids instead.
            timeout_seconds: for all of it; None: as long as the gateway allows.
            others: see GenerateRequest in inference.proto.

        Raises:
            InvalidInput: not exactly one of prompt, messages and tokens is given, or the gateway refuses a field.
            KvmeshError: see Generate in inference.proto.
        """
        if sum(given is not None for given in (prompt, messages, tokens)) != 1:
            raise InvalidInput("exactly one of prompt, messages and tokens is needed", field="input")
        request = pb.GenerateRequest(
            model=model,
            chat=None if messages is None else pb.Chat(messages=[pb.ChatMessage(**m) for m in messages]),
            tokens=None if tokens is None else pb.TokenIds(ids=tokens),
            max_output_tokens=max_output_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            stop=stop,
            stop_ids=stop_ids,
            ignore_eos=ignore_eos,
        )
        if prompt is not None:
            request.prompt = prompt
        call = self._stub.Generate(request, timeout=timeout_seconds)
        try:
            with peer_errors("the gateway"):
                async for response in call:
                    yield _piece(response)
                    if response.finish_reason != FINISH_REASON_UNSPECIFIED:
                        return
            raise Unavailable("the gateway ended the stream without its last token", reason="stream_ended")
        finally:
            call.cancel()


def _piece(response: pb.GenerateResponse) -> Piece:
    is_last = response.finish_reason != FINISH_REASON_UNSPECIFIED
    return Piece(
        index=response.index,
        tokens=list(response.tokens),
        text=response.text,
        seed=response.seed if response.index == 0 else None,
        end=_end(response) if is_last else None,
    )


def _end(response: pb.GenerateResponse) -> End:
    timing = response.timing
    return End(
        finish_reason="length" if response.finish_reason == FINISH_REASON_LENGTH else "stop",
        prompt_tokens=response.usage.prompt_tokens,
        output_tokens=response.usage.output_tokens,
        time_to_first_token_seconds=_seconds(timing, "time_to_first_token"),
        parts_seconds={name: _seconds(timing, name) for name in TIMING_PARTS},
        decode_seconds=_seconds(timing, "decode"),
        attempts=timing.attempts,
        room=timing.room,
        failed_attempts=tuple(timing.failed_attempts),
    )


def _seconds(timing: Timing, name: str) -> float:
    nanoseconds: int = getattr(timing, name).ToNanoseconds()
    return nanoseconds / 1e9
