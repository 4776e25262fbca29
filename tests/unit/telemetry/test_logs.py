import asyncio
import logging
import re
from collections.abc import Iterator

import pytest

from kvmesh.telemetry import logs

log = logs.get("kvmesh.test")


@pytest.fixture(autouse=True)
def logging_restored() -> Iterator[None]:
    """Leaves logging as it was found."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    logs.identify("")
    logging.captureWarnings(False)
    root.handlers[:], root.level = handlers, level
    for name in ("kvmesh", "services"):
        logging.getLogger(name).setLevel(logging.NOTSET)


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What was logged, without the time."""
    return [line.partition(" ")[2] for line in capsys.readouterr().err.splitlines()]


def test_a_record_is_a_line_with_time_level_and_service(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("prefill", "info")
    log.info("serving on %s", "x")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z info prefill serving on x\n", capsys.readouterr().err)


def test_member_generation_and_room_are_named_while_they_are_bound(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("prefill", "info")
    logs.identify("p0/1")
    with logs.bind(generation="3.7"):
        with logs.bind(room="3.12"):
            log.info("a")
        with logs.bind(rank="p1/0"):
            log.warning("b")
    log.error("c")
    assert lines(capsys) == [
        "info prefill [p0/1] [g 3.7] [room 3.12] a",
        "warning prefill [p1/0] [g 3.7] b",
        "error prefill [p0/1] c",
    ]


async def test_a_task_keeps_what_was_bound_when_it_began(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("prefill", "info")

    async def work() -> None:
        log.info("works")

    async with asyncio.TaskGroup() as group:
        with logs.bind(room="1.1"):
            group.create_task(work())
        with logs.bind(room="1.2"):
            group.create_task(work())
    assert lines(capsys) == ["info prefill [room 1.1] works", "info prefill [room 1.2] works"]


def test_a_message_of_several_lines_becomes_one(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("prefill", "info")
    log.info("a\nb")
    assert lines(capsys) == ["info prefill a b"]


def test_a_traceback_is_one_line_innermost_first_with_what_caused_it(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("prefill", "info")

    def inner() -> None:
        raise ValueError("bad\nvalue")

    def outer() -> None:
        try:
            inner()
        except ValueError as error:
            raise RuntimeError("no step") from error

    try:
        outer()
    except RuntimeError:
        log.exception("the worker failed")
    [line] = lines(capsys)
    assert line.startswith("error prefill the worker failed | RuntimeError: no step (unit/telemetry/test_logs.py:")
    assert "outer < " in line
    assert " after ValueError: bad value (" in line


def test_a_group_shows_each_of_its_errors_and_a_group_of_one_only_that() -> None:
    two = ExceptionGroup("two", [ValueError("a"), KeyError("b")])
    assert logs.describe(two) == "ExceptionGroup: two (2 sub-exceptions) {ValueError: a; KeyError: 'b'}"
    assert logs.describe(ExceptionGroup("one", [ExceptionGroup("inner", [ValueError("a")])])) == "ValueError: a"


def test_the_level_is_for_the_mesh_and_others_speak_from_warning_on(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("prefill", "info")
    log.debug("hidden")
    logging.getLogger("some.library").info("hidden")
    logging.getLogger("some.library").warning("shown")
    logging.getLogger("services.prefill").info("shown")
    assert lines(capsys) == ["warning prefill shown", "info prefill shown"]


def test_what_a_peer_wrote_reaches_the_log_without_escape_codes(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("gateway", "info")
    log.info("%s registers", "evil\x1b[2J\r\nname")
    try:
        raise ValueError("\x1b[31mred")
    except ValueError:
        log.exception("failed")
    first, second = lines(capsys)
    assert first == "info gateway evil [2J  name registers"
    assert "ValueError:  [31mred" in second
