from collections.abc import AsyncIterator

import pytest
from rich.console import Console

from kvmesh.cli.answer import in_short, tell, time_split
from kvmesh.client import TIMING_PARTS, End, Piece
from kvmesh.errors import Unavailable

END = End(
    finish_reason="length",
    prompt_tokens=40,
    output_tokens=21,
    time_to_first_token_seconds=0.5,
    parts_seconds={name: 0.01 * n for n, name in enumerate(TIMING_PARTS, 1)},
    decode_seconds=2.0,
    attempts=1,
    room=(1 << 40) + 24,
)


def piece(text: str, end: End | None = None) -> Piece:
    return Piece(index=0, tokens=[1], text=text, seed=None, end=end)


async def test_text_is_passed_on_as_it_comes() -> None:
    written: list[str] = []

    async def pieces() -> AsyncIterator[Piece]:
        yield piece("The ")
        assert written == ["The "]
        yield piece("")
        yield piece("sky", END)

    assert await tell(pieces(), written.append) is END
    assert written == ["The ", "sky"]


async def test_an_error_of_the_mesh_comes_through() -> None:
    async def pieces() -> AsyncIterator[Piece]:
        yield piece("The ")
        raise Unavailable("lost")

    with pytest.raises(Unavailable):
        await tell(pieces(), lambda text: None)


def test_the_time_split_has_a_row_for_each_part_and_the_rate() -> None:
    console = Console(width=100)
    with console.capture() as captured:
        console.print(time_split(END))
    rows = captured.get().splitlines()
    for n, name in enumerate(TIMING_PARTS, 1):
        [row] = [r for r in rows if r.startswith(name.replace("_", " ") + " ")]
        assert f" {10.0 * n:.1f} " in row
    assert any(r.startswith("total") and "500.0" in r and "40 prompt tokens" in r for r in rows)
    assert any(r.startswith("decode") and "10.0 tokens/s" in r for r in rows)


def test_an_answer_in_short_says_its_speed_and_whether_it_was_cut() -> None:
    assert in_short(END) == "21 tokens, the first after 0.50 s, 10.0 tokens/s, cut at the limit, room 1.24"
