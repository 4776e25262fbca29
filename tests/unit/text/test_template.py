"""Conversations are rendered as transformers renders them, and a template can do nothing else."""

from datetime import datetime
from pathlib import Path

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from kvmesh.errors import BadConfig, InvalidInput
from kvmesh.text.template import ChatTemplate
from kvmesh.text.tokenizer import Tokenizer
from tests.unit.model_source.smollm2 import smollm2_files
from tests.unit.nasty import STRINGS

USER = [{"role": "user", "content": "hi"}]
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "a <|im_end|> {{ b }} é\n"},
    {"role": "assistant", "content": "  c "},
    {"role": "user", "content": ""},
]

# Forms that models' own templates use: loops with control, namespaces, macros, filters, missing names.
TEMPLATES = [
    "{% for m in messages %}<|{{ m.role }}|>{{ m['content'] | trim }}{{ eos_token }}{% endfor %}",
    "{{ bos_token }}{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.content }}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "{% macro say(m) %}[{{ m.role | upper }}] {{ m.content }}{% endmacro %}{% for m in messages %}{{ say(m) }}{% endfor %}",
    "{{ messages | tojson }} {{ messages[0] | tojson(indent=2) }}",
    "{% for m in messages %}\n    {%- if m.role == 'user' %}\n  U: {{ m.content }}\n    {%- endif %}\n{% endfor %}\nend\n",
    "{% if tools is not none %}tools{% endif %}{% if absent %}x{% endif %}{{ absent }}|{{ unk_token }}",
    "{% if add_generation_prompt %}go{% endif %}{% generation %}x{% endgeneration %}",
    "{{ messages[-1]['content'].split('a')[-1] }}{{ messages | selectattr('role', 'equalto', 'user') | list | length }}",
]
NAMES = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("messages", [USER, TALK], ids=["one", "four"])
def test_it_renders_as_transformers_does(template: str, messages: list[dict[str, str]]) -> None:
    expected, _ = render_jinja_template([messages], chat_template=template, add_generation_prompt=True, **NAMES)
    assert ChatTemplate(template, NAMES).render(messages) == expected[0]


def test_smollm2_is_rendered_as_transformers_does() -> None:
    files = smollm2_files()
    ours = ChatTemplate.open(files, Tokenizer.open(files))
    assert ours is not None
    for text in STRINGS:
        messages = [{"role": "user", "content": text}]
        expected, _ = render_jinja_template([messages], chat_template=files.chat_template, add_generation_prompt=True)
        assert ours.render(messages) == expected[0]


def test_special_tokens_are_read_in_both_forms_and_from_ids(tmp_path: Path) -> None:
    files = smollm2_files()
    tokenizer = Tokenizer.open(files)
    template = "{{ bos_token }}{{ eos_token }}{{ unk_token }}"
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": {"content": "<B>"}, "unk_token": "<U>"}')
    for directory, rendered in ((tmp_path, "<B><|im_end|><U>"), (tmp_path / "absent", "<|im_start|><|im_end|>")):
        like = type(files)(**{**vars(files), "chat_template": template, "directory": directory})
        chat = ChatTemplate.open(like, tokenizer)
        assert chat is not None
        assert chat.render(USER) == rendered


def test_a_refusal_is_told_in_the_templates_own_words() -> None:
    template = ChatTemplate("{{ raise_exception('roles must\n alternate') }}", {})
    with pytest.raises(InvalidInput, match="refuses this: roles must alternate") as caught:
        template.render(USER)
    assert caught.value.field == "chat.messages"


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ raise_exception.__globals__ }}{{ raise_exception.__globals__['json'] }}",
        "{% for i in range(10000000) %}x{% endfor %}",
        "{{ messages[7].content }}",
        "{{ 1 / 0 }}",
        "{{ messages + 1 }}",
        "{% include 'x' %}",
    ],
)
def test_what_a_template_must_not_or_can_not_do_refuses_the_conversation(template: str) -> None:
    with pytest.raises(InvalidInput):
        ChatTemplate(template, {}).render([dict(message) for message in USER])


def test_a_long_refusal_is_cut() -> None:
    with pytest.raises(InvalidInput) as caught:
        ChatTemplate("{{ raise_exception(messages[0].content) }}", {}).render([{"role": "user", "content": "x" * 9999}])
    assert len(caught.value.message) < 300


def test_the_date_comes_from_the_clock() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", {}, now=lambda: datetime(2026, 12, 2))
    assert template.render(USER) == "02 Dec 2026"


def test_a_template_that_does_not_parse_is_bad_configuration() -> None:
    with pytest.raises(BadConfig, match="does not parse"):
        ChatTemplate("{% for %}", {})


def test_a_model_without_a_template_has_none() -> None:
    files = smollm2_files()
    without = type(files)(**{**vars(files), "chat_template": None})
    assert ChatTemplate.open(without, Tokenizer.open(files)) is None
