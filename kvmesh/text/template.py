"""A conversation as the model's own template renders it, in a sandbox: a template is data from strangers.

Called by the gateway. The names a template may use are those of the Hugging Face convention.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvmesh.errors import BadConfig, InvalidInput
from kvmesh.model.files import ModelFiles
from kvmesh.text.tokenizer import Tokenizer


class ChatTemplate:
    """One model's template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Args:
        source: Jinja.
        special_tokens: e.g. {"bos_token": "<s>"}.

        Raises:
            BadConfig: the template does not parse.
        """
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _tojson
        environment.globals |= {"raise_exception": _raise, "strftime_now": _now}
        self._special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise BadConfig(f"the model's chat template does not parse: {error}") from error

    @classmethod
    def open(cls, files: ModelFiles, tokenizer: Tokenizer) -> "ChatTemplate | None":
        """The template of a model; None where it has none.

        Raises:
            BadConfig: the template does not parse.
        """
        if files.chat_template is None:
            return None
        ids = {"bos_token": files.bos_id, "eos_token": next(iter(files.eos_ids), None)}
        texts = {name: tokenizer.text_of(token) or "" for name, token in ids.items() if token is not None}
        return cls(files.chat_template, texts)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The conversation as text, ready for the assistant's turn.

        Raises:
            InvalidInput: the template refuses the conversation; its own words.
        """
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **self._special_tokens)
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise InvalidInput(f"the model's chat template refuses this: {str(error)[:200]}", field="chat") from error


def _tojson(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)
