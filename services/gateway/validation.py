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


class Validator:
    """Checks requests against one model."""

    def __init__(
        self, model_name: str, tokenizer: Tokenizer, template: ChatTemplate | None, eos_ids: Sequence[int]
    ) -> None:
        self._model_name = model_name
        self._tokenizer, self._template, self._eos_ids = tokenizer, template, eos_ids

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
        return Plan(prompt, _output_len(request, len(prompt), limits), sampling, stop_ids, list(request.stop))

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
            if not request.tokens.ids:
                raise InvalidInput("at least one token is needed", field="tokens.ids")
            _check_length(len(request.tokens.ids), limits, "tokens.ids")
            self._check_ids(request.tokens.ids, "tokens.ids")
            return list(request.tokens.ids)
        if kind == "prompt":
            if not request.prompt:
                raise InvalidInput("the prompt is empty", field="prompt")
            self._check_bytes(request.prompt, limits, "prompt")
            prompt = self._tokenizer.encode(request.prompt)
        elif kind == "chat":
            prompt = self._tokenizer.encode_rendered(self._render(request.chat, limits))
        else:
            raise InvalidInput("one of prompt, chat and tokens is needed", field="input")
        if not prompt:
            raise InvalidInput("the prompt holds no token", field=kind)
        _check_length(len(prompt), limits, kind)
        return prompt

    def _render(self, chat: pb.Chat, limits: Limits) -> str:
        if self._template is None:
            raise InvalidInput("this model has no chat template; send prompt or tokens", field="chat")
        if not chat.messages:
            raise InvalidInput("at least one message is needed", field="chat.messages")
        for index, message in enumerate(chat.messages):
            if message.role not in ROLES:
                where = f"chat.messages[{index}].role"
                raise InvalidInput(f"role {message.role[:40]!r} is unknown; one of {', '.join(ROLES)}", field=where)
            self._check_bytes(message.content, limits, f"chat.messages[{index}].content")
        return self._template.render([{"role": m.role, "content": m.content} for m in chat.messages])

    def _check_bytes(self, text: str, limits: Limits, field: str) -> None:
        """Refuses what can't fit before it is tokenized: no token stands for more bytes than the longest of them."""
        most = limits.max_prompt_tokens * self._tokenizer.longest_token_bytes
        size = len(text.encode())
        if size > most:
            raise InvalidInput(
                f"{size} bytes can't fit {limits.max_prompt_tokens} prompt tokens", reason="too_long", field=field
            )

    def _check_ids(self, ids: Sequence[int], field: str) -> None:
        size = self._tokenizer.vocab_size
        for index, token in enumerate(ids):
            if token >= size:
                raise InvalidInput(f"token id {token} is not below the vocabulary's {size}", field=f"{field}[{index}]")


def _check_length(length: int, limits: Limits, field: str) -> None:
    if length > limits.max_prompt_tokens:
        raise InvalidInput(
            f"{length} prompt tokens exceed the limit of {limits.max_prompt_tokens}", reason="too_long", field=field
        )


def _output_len(request: pb.GenerateRequest, prompt_len: int, limits: Limits) -> int:
    room = limits.max_tokens - prompt_len
    if room < 1:
        raise InvalidInput(
            f"{prompt_len} prompt tokens leave no room for output: prompt and output share {limits.max_tokens}",
            reason="too_long",
            field="max_output_tokens",
        )
    if request.max_output_tokens > room:
        raise InvalidInput(
            f"{prompt_len} prompt tokens and {request.max_output_tokens} of output exceed the limit of {limits.max_tokens}",
            reason="too_long",
            field="max_output_tokens",
        )
    return request.max_output_tokens or min(DEFAULT_OUTPUT_TOKENS, room)


def _sampling(request: pb.GenerateRequest) -> Sampling:
    temperature = request.temperature
    if not (math.isfinite(temperature) and 0 <= temperature <= MAX_TEMPERATURE):
        raise InvalidInput(f"temperature is {temperature:g}; 0 to {MAX_TEMPERATURE:g} is allowed", field="temperature")
    top_p = request.top_p if request.HasField("top_p") else 1.0
    if not 0 < top_p <= 1:
        raise InvalidInput(f"top_p is {top_p:g}; more than 0 and at most 1 is allowed", field="top_p")
    seed = request.seed if request.HasField("seed") else secrets.randbits(64)
    return Sampling(temperature=temperature, top_k=request.top_k, top_p=top_p, seed=seed)
