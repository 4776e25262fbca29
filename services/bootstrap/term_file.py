"""The registry's term, in one durable file: locked while the registry lives, written and fsynced before it is used."""

import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import Self

from kvmesh.errors import BadConfig
from kvmesh.protocol.ids import MAX_TERM, Term

NAME = "term"


class TermFile:
    """The term of a state directory, held by one process."""

    def __init__(self, state_dir: Path) -> None:
        """Takes the directory and raises its term by one.

        Raises:
            BadConfig: the directory can't be written, another registry holds it, or the file is damaged.
        """
        self._path = state_dir / NAME
        try:
            state_dir.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(state_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise BadConfig(f"state_dir {state_dir} can't be used: {error.strerror}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.term = Term(self._read() + 1)
            self._write(self.term)
        except BlockingIOError as error:
            os.close(self._lock)
            raise BadConfig(f"state_dir {state_dir} is held by another registry") from error
        except BadConfig:
            os.close(self._lock)
            raise

    def __enter__(self) -> Self:
        """Holds the directory."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Gives the directory back."""
        os.close(self._lock)

    def hear(self, term: Term) -> None:
        """A higher term was seen somewhere: the next start goes above it.

        Raises:
            BadConfig: it can't be written.
        """
        if term > self.term:
            self._write(term)

    def _read(self) -> Term:
        try:
            text = self._path.read_text(encoding="ascii").strip()
        except FileNotFoundError:
            return Term(0)
        except (OSError, UnicodeDecodeError) as error:
            raise BadConfig(f"the term in {self._path} can't be read: {error}") from error
        if not text.isdigit() or not 0 < int(text) < MAX_TERM:
            raise BadConfig(
                f"the term in {self._path} is damaged; write a number above every term used before (1 to {MAX_TERM - 1})"
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
            directory = os.open(self._path.parent, os.O_RDONLY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
        except OSError as error:
            raise BadConfig(f"the term can't be written to {self._path}: {error.strerror}") from error
