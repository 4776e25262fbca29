"""The registry's term, in one durable file: locked while the registry lives, written and fsynced before it is used.

Called where the service is composed. The lock is a file of its own, since the term's is replaced with every write.
"""

import fcntl
import os
import re
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from kvmesh.errors import BadConfig
from kvmesh.protocol.ids import MAX_TERM, Term

TERM_NAME, LOCK_NAME = "term", "lock"
_TERM = re.compile(r"[1-9][0-9]*\n")
"""With its end of line, so that a file that was cut off is seen."""


class TermFile:
    """The term of a state directory, held by one process."""

    def __init__(self, state_dir: Path) -> None:
        """Takes the directory and raises its term by one.

        Raises:
            BadConfig: the directory can't be written, another registry holds it, or the term is damaged; one line.
        """
        self._directory = state_dir
        self._path = state_dir / TERM_NAME
        with ExitStack() as undo:
            self._lock = _lock(state_dir)
            undo.callback(os.close, self._lock)
            self.term = Term(self._read() + 1)
            if self.term > MAX_TERM:
                raise BadConfig(f"the term in {self._path} is {MAX_TERM}, the last one")
            self._write(self.term)
            undo.pop_all()

    def __enter__(self) -> Self:
        """Holds the directory."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Gives the directory back."""
        os.close(self._lock)

    def hear(self, term: Term) -> None:
        """A higher term was seen somewhere: the next start goes above it. Not higher: nothing.

        Raises:
            BadConfig: it can't be written.
        """
        if term > self.term:
            self._write(term)

    def _read(self) -> Term:
        try:
            text = self._path.read_text(encoding="ascii")
        except FileNotFoundError:
            return Term(0)
        except UnicodeDecodeError:
            text = ""
        except OSError as error:
            raise BadConfig(f"the term in {self._path} can't be read: {error.strerror}") from error
        if not _TERM.fullmatch(text) or int(text) > MAX_TERM:
            raise BadConfig(
                f"the term in {self._path} is damaged; write a line with a number above every term used before"
            )
        return Term(int(text))

    def _write(self, term: Term) -> None:
        """Whole or not at all, and on the disk when this returns."""
        fresh = self._path.with_suffix(".new")
        try:
            with fresh.open("w", encoding="ascii") as file:
                file.write(f"{term}\n")
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(self._path)
            directory = os.open(self._directory, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
        except OSError as error:
            raise BadConfig(f"the term can't be written to {self._path}: {error.strerror}") from error


def _lock(state_dir: Path) -> int:
    """The descriptor that holds the directory's lock.

    Raises:
        BadConfig: the directory can't be used, or another registry holds it.
    """
    try:
        state_dir.mkdir(parents=True, exist_ok=True)
        lock = os.open(state_dir / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise BadConfig(f"state_dir {state_dir} can't be used: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        held = isinstance(error, BlockingIOError)
        why = "is held by another registry" if held else f"can't be locked: {error.strerror}"
        raise BadConfig(f"state_dir {state_dir} {why}") from error
    return lock
