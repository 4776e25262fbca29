"""What a request must be before a room is minted for it: checked here, refused with the field's name and its limit.

Called by the servicer. Turns a request into a `Plan`; never repeats a prompt in an error.
"""

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from kvmesh.errors import InvalidInput, UnknownModel
from kvmesh.text.template import ChatTemplate
from kvmesh.text.tokenizer import Tokenizer
from kvmesh.v1 import bootstrap_pb2
from kvmesh.v1 import inference_pb2 as pb
from kvmesh.v1.types_pb2 import Sampling

DEFAULT_OUTPUT_TOKENS = 256
MAX_TEMPERATURE = 100.0
MAX_STOPS, MAX_STOP_BYTES, MAX_STOP_IDS = 16, 256, 64
ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, slots=True)
class Limits:
    """What the mesh can hold, in tokens; the smaller of what its members say and what the model has."""

    max_tokens: int
    """Prompt plus output."""
    max_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Plan:
    """A request, checked."""

    prompt: Sequence[int]
    max_output_len: int
    sampling: Sampling
    stop_ids: Sequence[int]
    stops: Sequence[str]
    continues: bool
    """The output goes on where the prompt ends, as opposed to a turn of its own in a conversation."""


class Validator:
    """Checks requests against one model."""

    def __init__(
        self,
        model_name: str,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        *,
        eos_ids: Sequence[int],
        max_positions: int,
    ) -> None:
        """Args:
        eos_ids: the model's own end-of-text tokens.
        max_positions: the model's own limit on prompt plus output, in tokens.
        """
        self._model_name = model_name
        self._tokenizer, self._template = tokenizer, template
        self._eos_ids, self._max_positions = eos_ids, max_positions

    def limits(self, told: bootstrap_pb2.MeshLimits) -> Limits:
        """The mesh's, where it has told; the model's own until then, since a request may wait for a pair."""
        max_tokens = min(told.max_tokens or self._max_positions, self._max_positions)
        return Limits(max_tokens, min(told.max_prompt_tokens or max_tokens, max_tokens - 1))

    def plan(self, request: pb.GenerateRequest, limits: Limits) -> Plan:
        """Checks and tokenizes; may take long for a long prompt, so it runs in a thread.

        Raises:
            InvalidInput: a field is missing, malformed or over its limit.
            UnknownModel: another model is asked for.
        """
        if request.model and request.model != self._model_name:
            raise UnknownModel(
                f"model {request.model[:80]!r} is not served here; {self._model_name!r} is", field="model"
            )
        if request.n > 1:
            raise InvalidInput(f"n is {request.n}; only 1 completion is served", field="n")
        sampling = _sampling(request)
        self._check_stops(request)
        prompt = self._prompt(request, limits)
        stop_ids = list(request.stop_ids) + ([] if request.ignore_eos else list(self._eos_ids))
        return Plan(
            prompt=prompt,
            max_output_len=_output_len(request, len(prompt), limits),
            sampling=sampling,
            stop_ids=list(dict.fromkeys(stop_ids)),
            stops=list(request.stop),
            continues=request.WhichOneof("input") != "chat",
        )

    def _check_stops(self, request: pb.GenerateRequest) -> None:
        if len(request.stop) > MAX_STOPS:
            raise InvalidInput(f"{len(request.stop)} stop strings; at most {MAX_STOPS}", field="stop")
        for index, stop in enumerate(request.stop):
            if not 0 < len(stop.encode()) <= MAX_STOP_BYTES:
                raise InvalidInput(f"a stop string has 1 to {MAX_STOP_BYTES} bytes", field=f"stop[{index}]")
        if len(request.stop_ids) > MAX_STOP_IDS:
            raise InvalidInput(f"{len(request.stop_ids)} stop ids; at most {MAX_STOP_IDS}", field="stop_ids")
        self._check_ids(request.stop_ids, "stop_ids")

    def _prompt(self, request: pb.GenerateRequest, limits: Limits) -> Sequence[int]:
        kind = request.WhichOneof("input")
        if kind == "tokens":
            prompt: Sequence[int] = request.tokens.ids
            field = "tokens.ids"
        elif kind == "prompt":
            self._check_bytes(len(request.prompt.encode()), limits, "prompt")
            prompt = self._tokenizer.encode(request.prompt) if request.prompt else []
            field = "prompt"
        elif kind == "chat":
            prompt = self._tokenizer.encode_rendered(self._render(request.chat, limits))
            field = "chat.messages"
        else:
            raise InvalidInput("one of prompt, chat and tokens is needed", field="input")
        if not prompt:
            raise InvalidInput("it is empty; at least one token is needed", field=field)
        if len(prompt) > limits.max_prompt_tokens:
            raise InvalidInput(
                f"{len(prompt)} prompt tokens exceed the limit of {limits.max_prompt_tokens}",
                reason="too_long",
                field=field,
            )
        self._check_ids(prompt, field)
        return list(prompt)

    def _render(self, chat: pb.Chat, limits: Limits) -> str:
        field = "chat.messages"
        if self._template is None:
            raise InvalidInput("this model has no chat template; send prompt or tokens", field="chat")
        if not chat.messages:
            raise InvalidInput("at least one message is needed", field=field)
        if len(chat.messages) > limits.max_prompt_tokens:
            raise InvalidInput(
                f"{len(chat.messages)} messages can't fit {limits.max_prompt_tokens} prompt tokens",
                reason="too_long",
                field=field,
            )
        for index, message in enumerate(chat.messages):
            if message.role not in ROLES:
                raise InvalidInput(
                    f"role {message.role[:40]!r} is unknown; one of {', '.join(ROLES)} is needed",
                    field=f"{field}[{index}].role",
                )
        self._check_bytes(sum(len(message.content.encode()) for message in chat.messages), limits, field)
        text = self._template.render([{"role": m.role, "content": m.content} for m in chat.messages])
        self._check_bytes(len(text.encode()), limits, field)
        return text

    def _check_bytes(self, size: int, limits: Limits, field: str) -> None:
        """Refuses what can't fit before it is tokenized: no token stands for more bytes than the longest of them."""
        most = limits.max_prompt_tokens * self._tokenizer.longest_token_bytes
        if size > most:
            raise InvalidInput(
                f"{size} bytes are over the {most} that {limits.max_prompt_tokens} prompt tokens can hold",
                reason="too_long",
                field=field,
            )

    def _check_ids(self, ids: Sequence[int], field: str) -> None:
        size = self._tokenizer.vocab_size
        for index, token in enumerate(ids):
            if token >= size:
                raise InvalidInput(f"token id {token} is not below the vocabulary's {size}", field=f"{field}[{index}]")


def _output_len(request: pb.GenerateRequest, prompt_len: int, limits: Limits) -> int:
    left = limits.max_tokens - prompt_len
    if request.max_output_tokens > left:
        raise InvalidInput(
            f"{prompt_len} prompt tokens and {request.max_output_tokens} of output exceed the limit of"
            f" {limits.max_tokens}",
            reason="too_long",
            field="max_output_tokens",
        )
    return request.max_output_tokens or min(DEFAULT_OUTPUT_TOKENS, left)


def _sampling(request: pb.GenerateRequest) -> Sampling:
    temperature = request.temperature
    if not (math.isfinite(temperature) and 0 <= temperature <= MAX_TEMPERATURE):
        raise InvalidInput(f"temperature is {temperature:g}; 0 to {MAX_TEMPERATURE:g} is allowed", field="temperature")
    top_p = request.top_p if request.HasField("top_p") else 1.0
    if not 0 < top_p <= 1:
        raise InvalidInput(f"top_p is {top_p:g}; more than 0 and at most 1 is allowed", field="top_p")
    seed = request.seed if request.HasField("seed") else secrets.randbits(64)
    return Sampling(temperature=temperature, top_k=request.top_k, top_p=top_p, seed=seed)
