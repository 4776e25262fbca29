"""What one round moves: rooms, each with its pages at the source and at the target. Used by everyone here; knows no pool."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvmesh.kv.layout import Shard

PAGE_SIZE = 16
SHARD = Shard(layer_begin=0, layer_end=16, head_begin=0, head_end=8, head_dim=128, dtype="bf16")
"""Half the layers of an 8B model: a page is a MiB."""
PAGE_BYTES = PAGE_SIZE * SHARD.bytes_per_token
ROOM_PAGES = (64, 16, 16, 16, 16, 64, 16, 16, 16, 16)
"""Rooms of 64 and of 16 MiB, together 256: the cache holds 32."""


class Room(NamedTuple):
    """One room, as one end sees it."""

    number: int
    pages: list[int]

    @property
    def num_tokens(self) -> int:
        """All of its pages are full."""
        return len(self.pages) * PAGE_SIZE


@dataclass(frozen=True, slots=True)
class Turn:
    """One round of one path, as one end sees it."""

    rooms: list[Room]
    there: list[Room]
    """The same rooms at the other end: for ends that write into the target's memory themselves."""
    checked: bool = True
    """False: frames are made and opened without their checksum."""

    @property
    def num_bytes(self) -> int:
        """Of KV in all rooms."""
        return sum(len(room.pages) for room in self.rooms) * PAGE_BYTES


def drawn(room_pages: Sequence[int], draw: np.random.Generator) -> list[Room]:
    """Rooms of so many pages each, which together are all pages of a pool, in an order drawn at random."""
    pages = draw.permutation(sum(room_pages)).tolist()
    ends = np.cumsum(room_pages).tolist()
    return [
        Room(number, pages[end - count : end])
        for number, (end, count) in enumerate(zip(ends, room_pages, strict=True), start=1)
    ]
