"""A conversation as the model's own template renders it, in a sandbox: a template is data from strangers.

Called by the gateway. The names a template may use are those of the Hugging Face convention.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvmesh.errors import BadConfig, InvalidInput
from kvmesh.model.files import ModelFiles
from kvmesh.text.tokenizer import Tokenizer

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
_MAX_REFUSAL = 200  # characters of a template's own words that go to the client


class ChatTemplate:
    """One model's template. Safe to share between threads."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], now: Callable[[], datetime] = datetime.now
    ) -> None:
        """Args:
        source: Jinja.
        special_tokens: names the template may use for them, e.g. {"bos_token": "<s>"}.
        now: the clock behind the template's `strftime_now`.

        Raises:
            BadConfig: the template does not parse.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals |= {"raise_exception": _refuse, "strftime_now": lambda form: now().strftime(form)}
        self._names = {"tools": None, "documents": None, **special_tokens}
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise BadConfig(f"the model's chat template does not parse: {_line(error)}") from None

    @classmethod
    def open(cls, files: ModelFiles, tokenizer: Tokenizer) -> "ChatTemplate | None":
        """The template of a model; None where it has none.

        Raises:
            BadConfig: the template does not parse.
        """
        if files.chat_template is None:
            return None
        ids = {"bos_token": files.bos_id, "eos_token": next(iter(files.eos_ids), None)}
        names = {name: tokenizer.text_of(token) or "" for name, token in ids.items() if token is not None}
        return cls(files.chat_template, names | _special_tokens(files))

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The conversation as text, ready for the assistant's turn.

        Args:
            messages: each a role and a content.

        Raises:
            InvalidInput: the template refuses the conversation; its own words.
        """
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **self._names)
        # Whatever a stranger's template runs into, it is this conversation that it can't render.
        except Exception as error:
            message = f"the model's chat template refuses this: {_line(error)}"
            raise InvalidInput(message, field="chat.messages") from None


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; here it is as if it were not there."""

    tags = {"generation"}  # noqa: RUF012  # the name and type jinja2 asks for

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _special_tokens(files: ModelFiles) -> dict[str, str]:
    """As tokenizer_config.json spells them, in one of two forms."""
    path = files.directory / "tokenizer_config.json"
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    tokens = {name: config.get(name) for name in _SPECIAL_TOKENS}
    tokens = {name: token.get("content") if isinstance(token, dict) else token for name, token in tokens.items()}
    return {name: token for name, token in tokens.items() if isinstance(token, str)}


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is, where jinja2's own filter escapes it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:_MAX_REFUSAL]
