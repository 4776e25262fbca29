"""The reasons of kvmesh.errors are those that the source gives, so a metric's label is one of them or `other`."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvmesh.errors import OTHER, REASONS, KvmeshError, Unavailable, reason_heard

ROOT = Path(__file__).parents[2]
TREES = [
    ast.parse(path.read_text())
    for folder in ("kvmesh", "services")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if "_pb2" not in path.name
]
CONSTANTS = {
    target.id: node.value.value
    for tree in TREES
    for node in tree.body
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
    for target in node.targets
    if isinstance(target, ast.Name)
}


def given() -> Iterator[str]:
    """Each word that is passed as a reason, by itself or by a constant's name; labels of metrics aside."""
    for call in (node for tree in TREES for node in ast.walk(tree) if isinstance(node, ast.Call)):
        if isinstance(call.func, ast.Attribute) and call.func.attr == "labels":
            continue
        for value in (keyword.value for keyword in call.keywords if keyword.arg == "reason"):
            if isinstance(value, ast.Constant):
                yield value.value
            elif isinstance(value, ast.Name) and value.id in CONSTANTS:
                yield CONSTANTS[value.id]


def test_the_reasons_are_those_that_the_source_gives() -> None:
    assert set(given()) | {kind.default_reason for kind in KvmeshError.__subclasses__()} == REASONS


def test_every_reason_passes_from_peer_to_peer_and_into_a_label_as_it_is() -> None:
    assert {reason_heard(reason) for reason in REASONS} == REASONS
    assert {Unavailable("x", reason=reason).label for reason in REASONS} == REASONS


def test_a_word_of_a_newer_peer_passes_and_is_counted_as_other() -> None:
    error = Unavailable("x", reason=reason_heard("moon_is_full"))
    assert (error.reason, error.label) == ("moon_is_full", OTHER)


@pytest.mark.parametrize("text", ["", "Jane Doe", "a" * 41, "stage_lost\n", "x-1", "é", "\x1b[2J"])
def test_what_is_no_word_is_other(text: str) -> None:
    assert reason_heard(text) == OTHER
