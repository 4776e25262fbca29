"""`kvmesh trace`: where the time of one request went, stop by stop, from the latest spans of every process.

ROOM is what logs, exemplars and answers call it: "1.24".
"""

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvmesh.cli.shape import BOOTSTRAP_LISTEN, GATEWAY_LISTEN
from kvmesh.cli.spans import ANSWER_SECONDS, Row, collect, members, rows
from kvmesh.cli.watch import picture_now
from kvmesh.errors import BadConfig
from kvmesh.protocol.ids import MAX_COUNT, Term, compose, term_of

_BAR_COLUMNS = 32
_PLAIN_WIDTH = 140
"""Columns where there is no terminal to ask."""
_COLORS = {"gateway": "cyan", "bootstrap": "magenta", "decode": "green", "prefill": "yellow"}


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command and its flags."""
    trace = commands.add_parser("trace", help="where the time of a request went", description=__doc__)
    registry = os.environ.get("KVMESH_BOOTSTRAP", BOOTSTRAP_LISTEN)
    gateway = os.environ.get("KVMESH_GATEWAY", GATEWAY_LISTEN)
    trace.add_argument("room", help='the request\'s room, e.g. "1.24"')
    trace.add_argument(
        "--bootstrap", default=registry, help="the registry's address [KVMESH_BOOTSTRAP] (default %(default)s)"
    )
    trace.add_argument(
        "--gateway", default=gateway, help="the gateway's address [KVMESH_GATEWAY] (default %(default)s)"
    )
    trace.set_defaults(run=run)


def run(flags: argparse.Namespace) -> int:
    """The command; returns its exit code.

    Raises:
        BadConfig: ROOM is none.
        KvmeshError: the registry gave no picture.
    """
    room = parse_room(flags.room)
    found, silent = asyncio.run(_found(flags, room))
    for line in silent:
        print(f"no answer: {line}", file=sys.stderr)
    if not found:
        print(
            f"no spans of room {flags.room}: it is unknown, still running, or older than the spans that are kept",
            file=sys.stderr,
        )
        return 1
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, width=_PLAIN_WIDTH)
    console.print(drawn(found))
    return 0


def parse_room(text: str) -> int:
    """A room's number.

    Raises:
        BadConfig: the text is neither "term.count" nor a number.
    """
    term, dot, count = text.partition(".")
    numbers = [term, count] if dot else [term]
    try:
        if not all(n.isascii() and n.isdigit() for n in numbers):
            raise ValueError(text)
        room = compose(Term(int(term)), int(count)) if dot else int(term)
        return compose(term_of(room), room & MAX_COUNT)
    except ValueError:
        raise BadConfig(f"ROOM is {text!r}; something like 1.24 is needed") from None


async def _found(flags: argparse.Namespace, room: int) -> tuple[list[Row], list[str]]:
    picture = await picture_now(flags.bootstrap, ANSWER_SECONDS)
    answers, silent = await collect([flags.gateway, flags.bootstrap, *members(picture)], room)
    return rows(answers), silent


def drawn(found: Sequence[Row]) -> Table:
    """The waterfall."""
    whole = max(row.ended for row in found) or 1.0
    table = Table(box=SIMPLE, show_edge=False, pad_edge=False)
    table.add_column("process", no_wrap=True)
    table.add_column("span", no_wrap=True)
    table.add_column("begins ms", justify="right", no_wrap=True)
    table.add_column("takes ms", justify="right", no_wrap=True)
    table.add_column(f"0 … {whole * 1e3:.1f} ms", no_wrap=True, width=_BAR_COLUMNS)
    table.add_column("")
    for row in found:
        color = _COLORS.get(row.process.partition(" ")[0], "white")
        notes = [f"{name} {value}" for name, value in sorted(row.attributes.items())]
        table.add_row(
            Text(row.process, style=color),
            "  " * row.depth + row.name,
            f"{row.begun * 1e3:.1f}",
            f"{row.seconds * 1e3:.1f}",
            Text(bar(row, whole), style="red" if row.error else color),
            ", ".join([*([row.error] if row.error else []), *notes]),
        )
    return table


def bar(row: Row, whole_seconds: float) -> str:
    """A span's place on the time line; the shortest still shows."""
    scale = _BAR_COLUMNS / whole_seconds
    begin = min(_BAR_COLUMNS - 1, int(row.begun * scale))
    return " " * begin + "━" * max(1, min(_BAR_COLUMNS, round(row.ended * scale)) - begin)
