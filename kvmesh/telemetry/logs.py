"""Logs: one line on stderr for each record, with the member, generation and room it is about.

    2026-12-02T05:01:22.123Z info prefill [p0/1] [g 3.7] [room 3.12] message

Set up once by the life of a process; used by every layer. Errors are one line too: the frames they came through, innermost
first. Never given a prompt.
"""

import logging
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TypeVar

from kvmesh.telemetry.plain import plain

_T = TypeVar("_T")

LEVELS = ("debug", "info", "warning", "error")

_ROOTS = ("kvmesh", "services")
_MOST_FRAMES = 12
"""Innermost frames shown of a traceback."""

_process = {"service": "kvmesh", "member": ""}
_rank: ContextVar[str] = ContextVar("rank", default="")
_generation: ContextVar[str] = ContextVar("generation", default="")
_room: ContextVar[str] = ContextVar("room", default="")


def setup(service: str, level: str) -> None:
    """Sends this process's logs to stderr.

    Args:
        service: its name, shown in each line.
        level: one of LEVELS, for the mesh's own loggers; others speak from warning on.
    """
    _process["service"] = service
    to_stderr = logging.StreamHandler(sys.stderr)
    to_stderr.setFormatter(_OneLine())
    root = logging.getLogger()
    root.handlers[:] = [to_stderr]
    root.setLevel(logging.WARNING)
    for name in _ROOTS:
        logging.getLogger(name).setLevel(level.upper())
    logging.captureWarnings(True)


def identify(member: str) -> None:
    """Names this process's member, e.g. "p0/1", in every line from now on."""
    _process["member"] = member


def process_name() -> str:
    """This process, e.g. "prefill p0/1"."""
    return " ".join(filter(None, _process.values()))


def get(name: str) -> logging.Logger:
    """The logger of a module: `logs.get(__name__)`."""
    return logging.getLogger(name)


class OnChange:
    """Says a line again only once something else was said: for what is tried again without end."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._said = ""

    def info(self, text: str) -> None:
        """Logs a line, unless it is the one said last."""
        self._say(logging.INFO, text)

    def warning(self, text: str) -> None:
        """The same, where someone has to do something."""
        self._say(logging.WARNING, text)

    def clear(self) -> None:
        """All is well: the next line is said, whatever it is."""
        self._said = ""

    def _say(self, level: int, text: str) -> None:
        if text != self._said:
            self._said = text
            self._logger.log(level, text)


@contextmanager
def bind(*, rank: str | None = None, generation: str | None = None, room: str | None = None) -> Iterator[None]:
    """Names in every line logged inside, in this task and in those it starts.

    Args:
        rank: e.g. "p0/1", instead of the process's own member.
        generation: as people read it, e.g. "3.7" (`kvmesh.protocol.ids.short`).
        room: the same.
    """
    with _set(_rank, rank), _set(_generation, generation), _set(_room, room):
        yield


@contextmanager
def _set(variable: ContextVar[_T], value: _T | None) -> Iterator[None]:
    if value is None:
        yield
        return
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


class _OneLine(logging.Formatter):
    """A record as one line."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        words = [f"{stamp}.{int(record.msecs):03d}Z", record.levelname.lower(), _process["service"], *_tags()]
        words.append(plain(record.getMessage()).strip())
        if record.exc_info and record.exc_info[1] is not None:
            words.append(f"| {plain(describe(record.exc_info[1]))}")
        return " ".join(words)


def _tags() -> Iterator[str]:
    if member := _rank.get() or _process["member"]:
        yield f"[{member}]"
    if generation := _generation.get():
        yield f"[g {generation}]"
    if room := _room.get():
        yield f"[room {room}]"


def describe(error: BaseException) -> str:
    """An error in one line: what it says, and the frames it came through, innermost first. A group of one is its one."""
    if isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        return describe(error.exceptions[0])
    frames = traceback.extract_tb(error.__traceback__)[-_MOST_FRAMES:]
    places = [f"{_place(f.filename)}:{f.lineno} {f.name}" for f in reversed(frames)]
    said = " ".join(f"{type(error).__name__}: {error}".split())
    line = f"{said} ({' < '.join(places)})" if places else said
    if isinstance(error, BaseExceptionGroup):
        line += " {" + "; ".join(describe(e) for e in error.exceptions) + "}"
    earlier = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return f"{line} after {describe(earlier)}" if earlier is not None else line


def _place(filename: str) -> str:
    return "/".join(Path(filename).parts[-3:])
