"""Which test covers which row of docs/field-cases.md: `python tests/field_cases.py [--list] [--deep]`, or `make field-cases`.

A test covers the rows that its docstring names; `F-P16, impossible: …` shows that a row can't happen here. A row that needs
what does not exist yet stands in `PLANNED`. Runs those tests, prints row, tests and result, and the counts; exits 1 when a row
has neither test nor plan, or anything else here is not in order.
"""

import argparse
import contextlib
import io
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "field-cases.md"
CAPABILITIES = (
    "authentication",
    "decode pipelines",
    "head shards",
    "prefix cache",
    "registry replicas",
    "shared memory",
    "swap",
    "traces",
)
"""What may be waited for."""
PLANNED: dict[str, str] = {
    "F-P9": "prefix cache",
    "F-P12": "prefix cache",
    "F-P23": "decode pipelines",
    "F-A8": "swap",
    "F-A9": "swap",
    "F-K8": "head shards",
    "F-S1": "authentication",
}
"""Row → the capability it waits for."""

_ROW = r"F-[A-Z]\d+"
_IMPOSSIBLE = re.compile(rf"({_ROW}(?:, {_ROW})*), impossible")


@dataclass(frozen=True)
class Case:
    """A test function and the rows it names; with parameters, all its runs together."""

    name: str
    """As pytest spells it, without parameters."""
    rows: frozenset[str]
    impossible: frozenset[str]
    """Those of `rows` that it shows to be impossible."""
    deep: bool
    """All its runs are."""


@dataclass(eq=False)  # pytest keeps plugins in sets
class Collector:
    """A pytest plugin: the cases among what was collected, and how they ended."""

    cases: dict[str, Case] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)
    passed: set[str] = field(default_factory=set)
    skipped: set[str] = field(default_factory=set)

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        """Reads the docstring."""
        docstring = getattr(getattr(item, "function", None), "__doc__", None) or ""
        rows = frozenset(re.findall(rf"\b{_ROW}\b", docstring))
        if rows:
            name = name_of(item.nodeid)
            impossible = frozenset(row for rows in _IMPOSSIBLE.findall(docstring) for row in rows.split(", "))
            deep = item.get_closest_marker("deep") is not None and (name not in self.cases or self.cases[name].deep)
            self.cases[name] = Case(name, rows, impossible, deep)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leaves out what names no row."""
        items[:] = [item for item in items if name_of(item.nodeid) in self.cases]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Passed: all its runs, in all their phases. What is expected to fail does fail."""
        name = name_of(report.nodeid)
        if report.failed or hasattr(report, "wasxfail"):
            self.failed.add(name)
        elif report.skipped:
            self.skipped.add(name)
        elif report.when == "call":
            self.passed.add(name)


def name_of(nodeid: str) -> str:
    """A test without its parameters."""
    return nodeid.partition("[")[0]


def rows_of(page: Path = PAGE) -> list[str]:
    """The numbers of the table's rows, in order."""
    return re.findall(rf"^\| ({_ROW}) \|", page.read_text(), re.MULTILINE)


def sources() -> list[Path]:
    """Files of tests in which some row is named."""
    return [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if re.search(_ROW, path.read_text())]


def collect(run: bool, arguments: Sequence[str] = ()) -> tuple[Collector, int]:
    """Collects the cases and, if asked, runs them; also pytest's exit code."""
    collector = Collector()
    told = ["--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml"), *arguments, *map(str, sources())]
    if run:
        return collector, int(pytest.main(told, plugins=[collector]))
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = pytest.main([*told, "--collect-only"], plugins=[collector])
    if code != pytest.ExitCode.OK:
        print(said.getvalue(), file=sys.stderr)
    return collector, int(code)


def faults(rows: Sequence[str], cases: Mapping[str, Case], planned: Mapping[str, str]) -> list[str]:
    """What is not in order, one line each."""
    named = {row for case in cases.values() for row in case.rows}
    found = [f"{row} stands in the table {rows.count(row)} times" for row in sorted(set(rows)) if rows.count(row) > 1]
    found += [f"{row} has no test and no plan" for row in rows if row not in named and row not in planned]
    found += [f"{row} is planned and has a test" for row in planned if row in named]
    found += [f"{row} is planned and is no row" for row in planned if row not in rows]
    found += [
        f"{row} waits for {what!r}, which is no capability" for row, what in planned.items() if what not in CAPABILITIES
    ]
    found += [f"{case.name} names {row}, which is no row" for case in cases.values() for row in case.rows - set(rows)]
    return found


def kind_of(row: str, cases: Mapping[str, Case]) -> str:
    """`covered`, `impossible` (every test says so), `planned`, or `missing`."""
    naming = [case for case in cases.values() if row in case.rows]
    if naming:
        return "impossible" if all(row in case.impossible for case in naming) else "covered"
    return "planned" if row in PLANNED else "missing"


def result_of(case: Case, collector: Collector, ran: bool, deep: bool) -> str:
    """How a test ended, for people."""
    if case.deep and not deep:
        return "deep, run by make test-deep"
    if not ran:
        return "not run"
    if case.name in collector.failed or case.name not in collector.passed | collector.skipped:
        return "FAIL"
    return "pass" if case.name in collector.passed else "skip"


def main() -> int:
    """Prints the table; the exit code."""
    parser = argparse.ArgumentParser(description="Row of docs/field-cases.md, its tests, how they end.")
    parser.add_argument("--list", action="store_true", help="collect and print, run nothing")
    parser.add_argument("--deep", action="store_true", help="run the deep tests too")
    given = parser.parse_args()
    ran = not given.list
    collector, code = collect(ran, [] if given.deep else ["-m", "not deep"])
    rows, cases = rows_of(), collector.cases
    wrong = faults(rows, cases, PLANNED)
    if code != pytest.ExitCode.OK:
        wrong.append(f"pytest ended with {code}")
    for row in rows:
        print(f"{row:6} {kind_of(row, cases)}" + (f": {PLANNED[row]}" if row in PLANNED else ""))
        naming = [case for case in cases.values() if row in case.rows]
        results = [result_of(case, collector, ran, given.deep) for case in naming]
        for case, result in zip(naming, results, strict=True):
            print(f"       {result:5} {case.name.removeprefix('tests/')}")
            if result == "FAIL":
                wrong.append(f"{row}: {case.name} failed, or did not run")
        if set(results) == {"skip"}:
            wrong.append(f"{row}: every test was skipped")
    counts = {kind: sum(kind_of(row, cases) == kind for row in rows) for kind in ("covered", "impossible", "planned")}
    print(f"\n{len(rows)} rows: " + ", ".join(f"{count} {kind}" for kind, count in counts.items()))
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
