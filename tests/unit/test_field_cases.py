"""docs/field-cases.md and the tests agree: every row has a test or a plan. What the tests say is `make field-cases`."""

import pytest

from tests.field_cases import CAPABILITIES, PLANNED, Case, collect, faults, rows_of

ROWS = ["F-A1", "F-A2", "F-A3"]
CASES = {"t": Case("t", frozenset({"F-A1", "F-A2"}), frozenset({"F-A2"}), deep=False)}
PLAN = {"F-A3": "traces"}


def test_every_row_has_a_test_or_a_plan_and_no_test_names_another() -> None:
    collector, code = collect(run=False)
    assert code == pytest.ExitCode.OK
    assert len(collector.cases) > 50
    assert faults(rows_of(), collector.cases, PLANNED) == []


def test_what_is_in_order_has_no_fault() -> None:
    assert faults(ROWS, CASES, PLAN) == []


@pytest.mark.parametrize(
    ("rows", "plan", "said"),
    [
        ([*ROWS, "F-A4"], PLAN, "F-A4 has no test and no plan"),
        ([*ROWS, "F-A1"], PLAN, "F-A1 stands in the table 2 times"),
        (["F-A1", "F-A3"], PLAN, "t names F-A2, which is no row"),
        (ROWS, {**PLAN, "F-A1": "traces"}, "F-A1 is planned and has a test"),
        (ROWS, {**PLAN, "F-Z1": "traces"}, "F-Z1 is planned and is no row"),
        (ROWS, {"F-A3": "time"}, "F-A3 waits for 'time', which is no capability"),
    ],
)
def test_what_is_not_in_order_is_named(rows: list[str], plan: dict[str, str], said: str) -> None:
    assert faults(rows, CASES, plan) == [said]


def test_a_plan_names_a_capability() -> None:
    assert set(PLANNED.values()) <= set(CAPABILITIES)
