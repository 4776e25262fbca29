"""Who imports what, where `make arch` can't see it: in the syntax, and in a fresh interpreter."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = [
    p for folder in ("kvmesh", "services") for p in sorted((ROOT / folder).rglob("*.py")) if "_pb2" not in p.name
]
PURE = sorted((ROOT / "kvmesh" / "protocol").rglob("*.py"))

TORCH_FREE = [
    "services.bootstrap.__main__",
    "services.gateway.__main__",
    "kvmesh.cli.__main__",
    "kvmesh.client",
    "kvmesh.kv.frames",
    "kvmesh.model.source",
]


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield node.module or ""


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_there_is_something_to_look_at() -> None:
    assert len(PURE) > 5
    assert len(SOURCES) > 40


@pytest.mark.parametrize("path", PURE, ids=name_of)
def test_the_pure_core_imports_only_itself_its_errors_and_the_standard_library(path: Path) -> None:
    foreign = [
        module
        for module in imported(ast.parse(path.read_text()))
        if module.split(".")[0] not in sys.stdlib_module_names
        and module != "kvmesh.errors"
        and not f"{module}.".startswith("kvmesh.protocol.")
    ]
    assert foreign == []


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_no_import_hides_in_a_function_or_behind_type_checking(path: Path) -> None:
    tree = ast.parse(path.read_text())
    top = {id(node) for node in tree.body}
    inner = [
        f"line {node.lineno}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom) and id(node) not in top
    ]
    assert inner == []


@pytest.mark.parametrize("module", TORCH_FREE)
def test_it_is_imported_without_torch(module: str) -> None:
    code = f"import sys, {module}; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
