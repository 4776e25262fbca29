"""docs/walk.md names the place of every stop; each `file::name` there exists in the code."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WALK = (ROOT / "docs" / "walk.md").read_text()
ANCHORS = sorted(set(re.findall(r"`([\w./-]+\.py)::([\w.]+)`", WALK)))
STOPS = re.findall(r"^\| (\d+) \|(.*)$", WALK, re.MULTILINE)


def names_in(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    """What a module or class defines: functions, classes and assigned names."""
    names: dict[str, ast.stmt] = {}
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names[node.name] = node
        elif isinstance(node, ast.Assign):
            names |= {t.id: node for t in node.targets if isinstance(t, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names[node.target.id] = node
    return names


def is_defined(path: Path, dotted: str) -> bool:
    body = ast.parse(path.read_text()).body
    for name in dotted.split("."):
        found = names_in(body).get(name)
        if found is None:
            return False
        body = found.body if isinstance(found, ast.ClassDef) else []
    return True


def test_the_walk_has_nine_stops_and_each_names_its_place() -> None:
    assert [number for number, _ in STOPS] == [str(n) for n in range(1, 10)]
    assert [number for number, row in STOPS if "::" not in row] == []


def test_every_double_colon_of_the_walk_is_an_anchor_that_is_checked() -> None:
    written = set(re.findall(r"`([^`]*::[^`]*)`", WALK)) - {"file::name"}
    assert written == {f"{file}::{name}" for file, name in ANCHORS}


@pytest.mark.parametrize(("file", "name"), ANCHORS, ids=[f"{file}::{name}" for file, name in ANCHORS])
def test_an_anchor_exists(file: str, name: str) -> None:
    assert (ROOT / file).is_file(), f"docs/walk.md names {file}, which is gone"
    assert is_defined(ROOT / file, name), f"docs/walk.md names {name}, which {file} does not define"


def test_a_name_that_is_not_there_is_noticed(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text("TABLE: dict = {}\nclass Room:\n    LIMIT = 1\n    async def end(self): ...\n")
    assert all(is_defined(module, n) for n in ("TABLE", "Room", "Room.end", "Room.LIMIT"))
    assert not any(is_defined(module, n) for n in ("Table", "end", "Room.begin", "Room.end.inner", "TABLE.x"))
