"""docs/recompute-or-move.md shows lines of Python and what they answer: each is run, and answers just that."""

import doctest
import importlib.util
import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "recompute-or-move.md"


def test_every_line_answers_what_is_shown() -> None:
    failed, tried = doctest.testfile(str(PAGE), module_relative=False, encoding="utf-8")
    assert tried >= 12
    assert failed == 0


def test_the_inputs_of_the_table_are_those_it_calculates_with() -> None:
    text = PAGE.read_text()
    rows = dict(
        re.findall(r"^\| `(link_bytes_per_second|tail_seconds|latency_seconds)` \| ([\d.]+) ", text, re.MULTILINE)
    )
    assert f"link_bytes_per_second={rows['link_bytes_per_second']}e9" in text
    assert f"tail_seconds={float(rows['tail_seconds']) / 1e3:g}\n" in text
    assert f"latency_seconds={float(rows['latency_seconds']) / 1e3:g}," in text
    token, context = re.findall(r"`token_seconds`, `context_seconds` \| ([\d.]+) ms, ([\d.]+) µs", text)[0]
    assert f"Compute(token_seconds={token}e-3, context_seconds={context}e-6)" in text


def test_the_benches_it_names_exist() -> None:
    named = set(re.findall(r"python -m (bench\.\w+)", PAGE.read_text()))
    assert len(named) == 2
    assert all(importlib.util.find_spec(name) for name in named)
