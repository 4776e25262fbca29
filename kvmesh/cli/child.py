"""Runs a service's module as a child that dies with its parent: `python -m kvmesh.cli.child PARENT_PID MODULE FLAGS…`.

Started by `processes.py`. Even a parent that was killed leaves no process behind. Services know nothing of it.
"""

import ctypes
import os
import runpy
import signal
import sys
import threading
from time import sleep

_PR_SET_PDEATHSIG = 1
_LOOK_SECONDS = 1.0
"""Where the kernel does not tell: how often to look whether the parent lives."""


def die_with(parent: int) -> None:
    """Ends this process, at once and for sure, when the parent ends.

    Args:
        parent: its process id.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_look_for, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # it died before we asked
        os.kill(os.getpid(), signal.SIGKILL)


def _look_for(parent: int) -> None:
    while os.getppid() == parent:
        sleep(_LOOK_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Becomes the module named on the command line."""
    parent, module, *flags = sys.argv[1:]
    die_with(int(parent))
    sys.argv[1:] = flags
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
