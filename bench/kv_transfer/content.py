"""The pools of both ends, and what lies in their pages. Used by sides and ends; knows no path."""

from collections.abc import Callable, Iterable

import torch
import xxhash
from torch import Tensor

from bench.kv_transfer.rooms import PAGE_SIZE, SHARD, Room
from kvmesh.kv.pool import PagePool

SEED = 7
"""Of what every source holds."""
PageOf = Callable[[int], Tensor]
"""The numbers of a page, of all layers, as a view: where a path takes a page to lie."""


def make_pool(num_pages: int) -> PagePool:
    """A pool all of whose memory is there: no page fault falls into what is measured."""
    layers = (SHARD.layer_begin, SHARD.layer_end)
    pool = PagePool(layers, SHARD.num_heads, SHARD.head_dim, PAGE_SIZE, num_pages, SHARD.dtype)
    wipe(pool)
    return pool


def fill(pool: PagePool) -> None:
    """Bytes at random, the same in each source."""
    draw = torch.Generator().manual_seed(SEED)
    flat = pool.slots.view(torch.int64).view(-1)
    torch.randint(-(2**63), 2**63 - 1, flat.shape, generator=draw, out=flat)


def wipe(pool: PagePool) -> None:
    """Nothing of an earlier round is left."""
    pool.slots.zero_()


def slots_of_page(pool: PagePool, page: int) -> Tensor:
    """Where the pool itself has a page: [L, 2, H, S, D]."""
    return pool.slots[:, :, :, page * PAGE_SIZE : (page + 1) * PAGE_SIZE]


def blocks_of_page(pool: PagePool, page: int) -> Tensor:
    """The same memory taken as engines with one block a page and layer have it: [L, bytes of a block]."""
    return blocks(pool)[:, page]


def blocks(pool: PagePool) -> Tensor:
    """All blocks, a view: [L, P, bytes of a block]."""
    return pool.slots.view(torch.uint8).view(SHARD.num_layers, pool.num_pages, -1)


def block_numbers(room: Room, num_pages: int) -> list[int]:
    """Which of all blocks a room's are, in the order of [L, P]: layer by layer, in each its pages."""
    return [layer * num_pages + page for layer in range(SHARD.num_layers) for page in room.pages]


def digests(rooms: Iterable[Room], page_of: PageOf) -> list[str]:
    """What lies in all pages of each room, in their order."""
    return [_digest(room, page_of) for room in rooms]


def _digest(room: Room, page_of: PageOf) -> str:
    state = xxhash.xxh3_128()
    for page in room.pages:
        state.update(page_of(page).contiguous().view(torch.uint8).numpy().data)
    return state.hexdigest()
