"""One answer of the mesh, streamed to a terminal, and where its time went. Called by `kvmesh up --prompt` and `kvmesh chat`."""

from collections.abc import AsyncIterator, Callable

from rich.box import SIMPLE
from rich.table import Table

from kvmesh.client import TIMING_PARTS, End, Piece
from kvmesh.errors import Internal
from kvmesh.protocol.ids import short

_MEANING = {
    "assign": "the registry places the request",
    "reserve": "the decoder reserves pages, its pairing stands",
    "queue": "the room waits at rank 0",
    "prefill": "the stages compute the prompt",
    "transfer_tail": "the last KV arrives",
    "join": "the room joins the decode batch",
    "other": "checks, template, tokenizing, network; rooms lost before",
}


async def tell(pieces: AsyncIterator[Piece], write: Callable[[str], None]) -> End:
    """Passes an answer's text on as it comes; returns how it ended.

    Raises:
        KvmeshError: what the gateway raised.
    """
    async for piece in pieces:
        if piece.text:
            write(piece.text)
        if piece.end is not None:
            return piece.end
    raise Internal("the answer has no end")


def in_short(end: End) -> str:
    """One line: tokens, time to the first, rate, and what to name to `kvmesh trace`."""
    rate = f", {end.decode_tokens_per_second:.1f} tokens/s" if end.output_tokens > 1 else ""
    cut = ", cut at the limit" if end.finish_reason == "length" else ""
    first = f"the first after {end.time_to_first_token_seconds:.2f} s"
    return f"{end.output_tokens} tokens, {first}{rate}{cut}, room {short(end.room)}"


def time_split(end: End) -> Table:
    """Where the time to the first token went, and the decode rate."""
    table = Table(box=SIMPLE, show_edge=False, pad_edge=False)
    table.add_column("time to first token")
    table.add_column("ms", justify="right")
    table.add_column("")
    for name in TIMING_PARTS:
        table.add_row(name.replace("_", " "), _ms(end.parts_seconds[name]), _MEANING[name])
    table.add_section()
    table.add_row("total", _ms(end.time_to_first_token_seconds), f"{end.prompt_tokens} prompt tokens")
    rate = f"{end.output_tokens} tokens, {end.decode_tokens_per_second:.1f} tokens/s"
    table.add_row("decode", _ms(end.decode_seconds), f"{rate}; room {short(end.room)}")
    return table


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"
