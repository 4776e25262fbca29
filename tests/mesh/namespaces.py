"""Network namespaces without names: each lives while a descriptor here holds it or a process runs in it.

So none is left behind, however the process that made it ends. Linux, and root.
"""

import ctypes
import os
import subprocess
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self, TypeVar

_CLONE_NEWNET = 0x40000000
_HERE = "/proc/thread-self/ns/net"
_Result = TypeVar("_Result")


class Namespace:
    """One namespace, held until the block ends."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @classmethod
    def new(cls) -> "Namespace":
        """Another network: nothing in it but a loopback that is down.

        Raises:
            OSError: it is not allowed here.
        """
        libc = ctypes.CDLL(None, use_errno=True)
        return cls(_in_thread(lambda: _checked(libc.unshare(_CLONE_NEWNET)), lambda: os.open(_HERE, os.O_RDONLY)))

    @classmethod
    def own(cls) -> "Namespace":
        """The one this process is in."""
        return cls(os.open(_HERE, os.O_RDONLY))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)

    @property
    def path(self) -> str:
        """By which ip and nsenter find it."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    @property
    def within(self) -> tuple[str, ...]:
        """The command that becomes another command in there."""
        return ("nsenter", f"--net={self.path}")

    def run(self, *command: str, lines: Sequence[str] = ()) -> str:
        """Runs a command in there, with lines to read; what it prints.

        Raises:
            AssertionError: it failed; with what it said.
        """
        done = subprocess.run(
            [*self.within, *command], input="\n".join(lines), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
        return done.stdout

    def call(self, function: Callable[[], _Result]) -> _Result:
        """Calls in there, in a thread of its own."""
        libc = ctypes.CDLL(None, use_errno=True)
        return _in_thread(lambda: _checked(libc.setns(self._descriptor, _CLONE_NEWNET)), function)


def _in_thread(enter: Callable[[], None], function: Callable[[], _Result]) -> _Result:
    """Enters a namespace and calls there; only the thread's own namespace changes."""
    results: list[_Result] = []
    errors: list[OSError] = []

    def run() -> None:
        try:
            enter()
            results.append(function())
        except OSError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    for error in errors:
        raise error
    return results[0]


def _checked(code: int) -> None:
    if code:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
