"""`kvmesh status`: who is registered, paired and how loaded, as the registry sees it."""

import argparse
import asyncio
import os
from contextlib import aclosing

from google.protobuf.json_format import MessageToDict
from rich.box import SIMPLE
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table

from kvmesh.cli.news import News, decoder_name
from kvmesh.cli.shape import BOOTSTRAP_LISTEN
from kvmesh.cli.watch import picture_now, pictures
from kvmesh.protocol.ids import short
from kvmesh.v1 import bootstrap_pb2 as pb

_ANSWER_SECONDS = 5.0
_PLAIN_WIDTH = 120
"""Columns where there is no terminal to ask."""


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command and its flags."""
    status = commands.add_parser("status", help="who is registered and paired", description=__doc__)
    registry = os.environ.get("KVMESH_BOOTSTRAP", BOOTSTRAP_LISTEN)
    status.add_argument(
        "--bootstrap", default=registry, help="the registry's address [KVMESH_BOOTSTRAP] (default %(default)s)"
    )
    status.add_argument("--watch", action="store_true", help="follow it until Ctrl-C")
    status.add_argument("--json", action="store_true", help="the picture as JSON, one line each")
    status.set_defaults(run=run)


def run(flags: argparse.Namespace) -> int:
    """The command; returns its exit code.

    Raises:
        KvmeshError: the registry gave no picture.
    """
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, width=_PLAIN_WIDTH)
    try:
        asyncio.run(_follow(flags, console) if flags.watch else _once(flags, console))
    except KeyboardInterrupt:
        return 0
    return 0


async def _once(flags: argparse.Namespace, console: Console) -> None:
    picture = await picture_now(flags.bootstrap, _ANSWER_SECONDS)
    if flags.json:
        _print_json(console, picture)
    else:
        console.print(drawn(picture))


async def _follow(flags: argparse.Namespace, console: Console) -> None:
    async with aclosing(pictures(flags.bootstrap)) as followed:
        if flags.json:
            async for picture in followed:
                _print_json(console, picture)
        elif console.is_terminal:
            with Live(console=console, auto_refresh=False) as live:
                async for picture in followed:
                    live.update(drawn(picture), refresh=True)
        else:
            news = News()
            async for picture in followed:
                for line in news.since(picture):
                    console.print(line, soft_wrap=True)


def _print_json(console: Console, picture: pb.WatchMeshResponse) -> None:
    console.print_json(data=MessageToDict(picture, always_print_fields_with_no_presence=True), indent=None)


def drawn(picture: pb.WatchMeshResponse) -> RenderableType:
    """The picture as tables."""
    limits = picture.limits
    model = f"model {limits.model_name}, up to {limits.max_tokens} tokens" if limits.model_name else "no member yet"
    return Group(
        f"registry term {picture.term}, {picture.rooms_minted} rooms minted, {model}\n",
        _stages(picture),
        "",
        _decoders(picture),
    )


def _stages(picture: pb.WatchMeshResponse) -> Table:
    table = _table("pipeline", "generation", "rank", "state", "layers", "waits for", "waiting", "running", "free pages")
    for pipeline in picture.pipelines:
        generation = short(pipeline.generation) if pipeline.generation else "–"
        for rank, seat in enumerate(pipeline.seats):
            held = seat.member.incarnation != 0
            load = [str(n) for n in (seat.load.waiting_rooms, seat.load.running_rooms, seat.load.free_pages)]
            shown = load if held and rank == 0 else ["–"] * len(load)  # rank 0 owns queue and pages of the pipeline
            table.add_row(
                *(pipeline.pipeline, generation, str(rank), _state(seat)),
                f"{seat.layers.begin}:{seat.layers.end}" if held else "–",
                seat.waits_for or "–",
                *shown,
            )
    return table


def _decoders(picture: pb.WatchMeshResponse) -> Table:
    names = {p.generation: p.pipeline for p in picture.pipelines if p.generation}
    table = _table("decoder", "paired with", "waiting", "running", "free pages", "last heard")
    for decoder in picture.decoders:
        paired = [names[g] for g in decoder.load.paired_generations if g in names]
        load = (decoder.load.waiting_rooms, decoder.load.running_rooms, decoder.load.free_pages)
        table.add_row(
            decoder_name(decoder.member.incarnation).partition(" ")[2],
            ", ".join(sorted(paired)) or "–",
            *(str(n) for n in load),
            f"{decoder.heartbeat_age.ToMilliseconds() / 1e3:.1f} s",
        )
    return table


def _table(*columns: str) -> Table:
    return Table(*columns, box=SIMPLE, show_edge=False, pad_edge=False)


def _state(seat: pb.SeatView) -> str:
    state = pb.SeatState.Name(seat.state).removeprefix("SEAT_STATE_").lower()
    return f"{state}, drains" if seat.load.draining else state
