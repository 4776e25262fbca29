"""The tables in docs/protocol.md are those of the code. `python tests/unit/test_protocol_tables_in_docs.py` writes them."""

import re
from pathlib import Path

import pytest

from kvmesh.protocol import head_room, life, pairing, rooms, seats

PAGE = Path(__file__).parents[2] / "docs" / "protocol.md"
TABLES = {
    "seats": seats.SEAT_TABLE,
    "life": life.LIFE_TABLE,
    "scheduler": head_room.ROOM_TABLE,
    "rooms": rooms.ROOM_TABLE,
    "pairing": pairing.PAIRING_TABLE,
}


def block(name: str) -> re.Pattern[str]:
    return re.compile(rf"<!-- table: {name} -->\n(.*?)<!-- end -->", re.DOTALL)


@pytest.mark.parametrize("name", TABLES)
def test_the_page_shows_the_table_of_the_code(name: str) -> None:
    shown = block(name).search(PAGE.read_text())
    assert shown is not None
    assert shown.group(1).strip() == TABLES[name].drawn()


if __name__ == "__main__":
    page = PAGE.read_text()
    for name, table in TABLES.items():
        page = block(name).sub(lambda _, n=name, t=table: f"<!-- table: {n} -->\n{t.drawn()}\n<!-- end -->", page)
    PAGE.write_text(page)
