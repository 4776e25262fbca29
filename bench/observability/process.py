"""One service with the switch beside it: `python -m bench.observability.process CONTROL MODULE FLAGS…`, started by `mesh.py`.

CONTROL is where a Unix socket is made: each line that comes, "on" or "off", is carried out and sent back. The thread that
reads it sleeps between two lines, so it costs neither side anything.
"""

import runpy
import socket
import sys
import threading

from bench.observability import switch

LINES = {b"on\n": True, b"off\n": False}


def obey(door: socket.socket) -> None:
    """Answers the first that connects, until it leaves."""
    with door:
        connection, _ = door.accept()
    with connection, connection.makefile("rwb", buffering=0) as lines:
        for line in lines:
            switch.turn(on=LINES[line])
            lines.write(line)


def main() -> None:
    """Becomes the service, and obeys beside it."""
    control, module, *flags = sys.argv[1:]
    door = socket.socket(socket.AF_UNIX)
    door.bind(control)
    door.listen(1)
    threading.Thread(target=obey, args=(door,), name="switch", daemon=True).start()
    sys.argv[1:] = flags
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
