"""`kvmesh trace`: where the time of one request went, stop by stop, from the latest spans of every process.

ROOM is what logs, exemplars and answers call it: "1.24".
"""

import argparse
import asyncio
import os
import sys

from rich.console import Console

from kvmesh.cli.shape import BOOTSTRAP_LISTEN, GATEWAY_LISTEN
from kvmesh.cli.spans import ANSWER_SECONDS, Row, collect, members, rows, stages
from kvmesh.cli.tls_given import add_tls_flags, tls_given
from kvmesh.cli.watch import picture_now
from kvmesh.cli.waterfall import drawn
from kvmesh.errors import BadConfig, KvmeshError
from kvmesh.protocol.ids import MAX_COUNT, Term, compose, term_of
from kvmesh.rpc.tls import Tls

_PLAIN_WIDTH = 140
"""Columns where there is no terminal to ask."""


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
    add_tls_flags(trace, "stages are asked over TLS")
    trace.set_defaults(run=run)


def run(flags: argparse.Namespace) -> int:
    """The command; returns its exit code.

    Raises:
        BadConfig: ROOM is none, or a file of TLS is unusable.
    """
    room = parse_room(flags.room)
    found, missing = asyncio.run(_found(flags, room, tls_given(flags)))
    for line in missing:
        print(line, file=sys.stderr)
    if not found:
        print(
            f"no spans of room {flags.room}: it is unknown, still running, or older than the spans that are kept",
            file=sys.stderr,
        )
        return 1
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, width=_PLAIN_WIDTH)
    console.print(drawn(found, console.width))
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


async def _found(flags: argparse.Namespace, room: int, tls: Tls | None) -> tuple[list[Row], list[str]]:
    """The rows, and what is missing. Without the registry nobody knows the members: the others are asked all the same."""
    known, over_tls, missing = [flags.gateway, flags.bootstrap], {}, []
    try:
        picture = await picture_now(flags.bootstrap, ANSWER_SECONDS)
        known += members(picture)
        over_tls = dict.fromkeys(stages(picture), tls) if tls is not None else {}
    except KvmeshError as error:
        missing.append(f"{error.message}: stages and decoders are not asked")
    answers, silent = await collect(known, room, over_tls)
    return rows(answers, room), [*missing, *silent]
