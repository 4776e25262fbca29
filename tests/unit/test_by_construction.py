"""What can't happen here because nothing in the source could do it: who may allocate, schedule, tell the time, wait for all."""

import ast
import dataclasses
import inspect
from collections.abc import Iterator
from pathlib import Path

from prometheus_client import Counter, Gauge, Histogram

from kvmesh import errors
from kvmesh.protocol.steps import AppliedLog, RoomAdmitted, RoomOnStage, Step, Work
from kvmesh.telemetry import metrics

ROOT = Path(__file__).parents[2]
TREES = {
    path.relative_to(ROOT).as_posix(): ast.parse(path.read_text())
    for folder in ("kvmesh", "services")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if "_pb2" not in path.name
}
PURE = [name for name in TREES if name.startswith("kvmesh/protocol/")]

CLOCKS = {"time", "datetime", "asyncio", "threading", "sched", "signal"}
COLLECTIVES = {"Barrier", "barrier", "all_reduce", "all_gather", "broadcast", "init_process_group", "multiprocessing"}
WALL_CLOCKS = {"time", "datetime"}
FOR_PEOPLE = {"kvmesh/telemetry/logs.py", "kvmesh/telemetry/traces.py", "kvmesh/text/template.py"}
"""Who may know the date: log lines, the begin of a span, and the chat templates that write it into a prompt."""


def imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(module, name) of each import; the name is empty where the module itself is imported."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", alias.name) for alias in node.names)


def who_imports(module: str, name: str) -> set[str]:
    return {file for file, tree in TREES.items() if (module, name) in set(imported(tree))}


def names_in(tree: ast.AST) -> set[str]:
    """Every name that is read, called or imported."""
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return names | {part for module, name in imported(tree) for part in (*module.split("."), name)}


def test_only_rank_0s_scheduler_and_a_decoders_rooms_allocate_pages() -> None:
    """F-P8, impossible: no stage has free pages of its own to admit by."""
    assert who_imports("kvmesh.protocol.pages", "Pages") == {"kvmesh/protocol/scheduler.py", "kvmesh/protocol/rooms.py"}
    deeds = {name for name, value in vars(AppliedLog).items() if inspect.isfunction(value) and not name.startswith("_")}
    assert deeds == {"apply"}, "a log gives no page away by itself"


def test_only_rank_0s_head_schedules() -> None:
    """F-P17, impossible: what a stage runs comes to it as a step; it has nothing to choose with."""
    assert who_imports("kvmesh.protocol.scheduler", "Scheduler") == {"services/prefill/head.py"}
    assert "Scheduler" in names_in(TREES["services/prefill/head.py"])
    assert list(inspect.signature(AppliedLog.apply).parameters) == ["self", "step"]


def test_nothing_waits_for_all_ranks_at_once() -> None:
    """F-P13, impossible: there is no collective and no barrier."""
    assert {file: found for file, tree in TREES.items() if (found := names_in(tree) & COLLECTIVES)} == {}


def test_what_decides_has_no_clock() -> None:
    """F-T8, impossible: time comes in with an event, and where rooms are concerned at the registry alone."""
    modules = {file: {module.split(".")[0] for module, _ in imported(TREES[file])} for file in PURE}
    assert {file: found for file in PURE if (found := modules[file] & CLOCKS)} == {}


def test_the_log_carries_no_deadline_and_a_stage_keeps_no_time() -> None:
    """F-T8, impossible: nothing on a rank above 0 could end a room by a clock."""
    kept = [f for kind in (AppliedLog, RoomOnStage) for f in dataclasses.fields(kind)]
    assert [f.name for f in kept if f.type is float] == []
    told = {f.name for kind in (Step, Work, RoomAdmitted) for f in dataclasses.fields(kind)}
    assert {name for name in told if "seconds" in name} == {"queued_seconds"}, "told to the client, judged by nobody"
    reads = [n.attr for file in PURE for n in ast.walk(TREES[file]) if isinstance(n, ast.Attribute)]
    assert "queued_seconds" not in reads


def test_no_duration_is_taken_from_a_clock_that_can_be_set() -> None:
    """F-T8, impossible: a skewed clock changes nothing."""
    trees = {file: tree for file, tree in TREES.items() if file not in FOR_PEOPLE}
    taken = {(file, name) for file, tree in trees.items() for module, name in imported(tree) if module in WALL_CLOCKS}
    assert {name for _, name in taken} == {"monotonic", "sleep"}, taken


def test_every_channel_and_every_server_is_made_where_both_ends_ping() -> None:
    """F-D6: whatever is spoken, a dead peer is noticed by the same means."""
    makers = {"insecure_channel", "secure_channel", "server"}
    made = {
        (file, call.func.attr): ast.unparse(call)
        for file, tree in TREES.items()
        for call in ast.walk(tree)
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr in makers
        and ast.unparse(call.func).startswith("grpc.")
    }
    assert {file for file, _ in made} <= {"kvmesh/rpc/channels.py", "kvmesh/rpc/life.py", "kvmesh/rpc/health.py"}
    assert len(made) >= 3
    for (_, maker), code in made.items():
        assert ("server_options(" if maker == "server" else "_common_options(") in code


def labels_given() -> Iterator[tuple[str, str, frozenset[str] | None]]:
    """(place, metric, labels given; None where it is used without) of each use of a metric."""
    for file, tree in TREES.items():
        labelled = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "labels":
                metric = node.func.value
                if ast.unparse(metric).startswith("metrics."):
                    labelled.add(id(metric))
                    given = frozenset(k.arg or "**" for k in node.keywords) | {"*" for _ in node.args}
                    yield f"{file}:{node.lineno}", ast.unparse(metric).removeprefix("metrics."), given
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Attribute)
                and id(node) not in labelled
                and ast.unparse(node).startswith("metrics.")
            ):
                yield f"{file}:{node.lineno}", node.attr, None


DECLARED = {n: m for n, m in vars(metrics).items() if isinstance(m, Counter | Gauge | Histogram)}
USES = [use for use in labels_given() if use[1] in DECLARED]


def test_every_metric_is_used() -> None:
    assert {metric for _, metric, _ in USES} == set(DECLARED)


def test_a_metric_is_used_with_the_labels_it_was_declared_with() -> None:
    """F-P22, impossible: other labels are the one way in which counting raises, and no loop gives any."""
    wrong = [use for use in USES if (use[2] or frozenset()) != frozenset(DECLARED[use[1]]._labelnames)]
    assert wrong == []


KINDS = {kind.__name__: kind for kind in errors.KvmeshError.__subclasses__()}
TEXTS = {
    node.targets[0].id: node.value.value
    for tree in TREES.values()
    for node in tree.body
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Constant)
}
"""Constants of modules, by name."""


def reasons_given() -> Iterator[str]:
    """The reason, written out or a constant, of each error that is made with one, and of each room that rank 0 refuses."""
    for call in (node for tree in TREES.values() for node in ast.walk(tree) if isinstance(node, ast.Call)):
        if ast.unparse(call.func) in {*KINDS, "pb.RoomRefused"}:
            for reason in (given.value for given in call.keywords if given.arg == "reason"):
                if isinstance(reason, ast.Constant):
                    yield str(reason.value)
                elif isinstance(reason, ast.Name) and reason.id in TEXTS:
                    yield str(TEXTS[reason.id])


def test_the_error_table_has_every_reason_that_is_given_and_no_other() -> None:
    """Counters by reason begin at 0 for those of the table; one that it lacked would be born with its first event."""
    assert {*reasons_given(), *(kind.default_reason for kind in KINDS.values())} == set(errors.REASONS)
