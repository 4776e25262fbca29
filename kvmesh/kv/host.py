"""Pages in this host's memory: room for them that is taken only when used, and copies of them at the speed of memory.

Called by `pool` for pools on the CPU. numpy copies here, not torch: it moves whole pages as one item each, lets go of the
interpreter's lock meanwhile, and starts no threads of its own. Knows bytes and page ids, no number format and no frame.
"""

import mmap
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvmesh.kv.layout import runs

Bytes = NDArray[np.void]

PAGES_OF_A_RUN = 8
"""Pages in a run, on average, from which copies run by run are as fast as copies page by page, in one call for all."""


def reserve(num_bytes: int) -> mmap.mmap:
    """Memory that is taken page by page as it is first written.

    Not in huge pages: one room of a few pages of KV touches one in each layer and head, and each is taken and cleared whole.
    docs/kv-wire.md has figures.

    Raises:
        OSError, OverflowError: the system has no room for so many bytes.
    """
    return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class HostPages:
    """Reads and writes ranges of a room's tokens in [L, 2, H, P * S] slots of `slot_bytes` each."""

    def __init__(self, memory: mmap.mmap, shape: tuple[int, int, int], page_size: int, slot_bytes: int) -> None:
        """Args:
        memory: all slots.
        shape: [L, 2, H].
        slot_bytes: of K or V of one token in one layer and head.
        """
        self._page_size, self._slot_bytes = page_size, slot_bytes
        self._slots: Bytes = np.frombuffer(memory, np.dtype((np.void, slot_bytes))).reshape(*shape, -1)
        self._pages: Bytes = np.frombuffer(memory, np.dtype((np.void, slot_bytes * page_size))).reshape(*shape, -1)

    def read(
        self, into: memoryview, pages: Sequence[int], layers: slice, heads: slice, token_begin: int, token_end: int
    ) -> None:
        """Copy tokens [token_begin, token_end) of the room in `pages` to `into`, [L, 2, H, T] slots without gaps.

        Args:
            layers: of the pool, from 0.

        Raises:
            IndexError: the tokens lie outside `pages`, or a page outside the pool.
        """
        ids, first = self._ids(pages, token_begin, token_end), token_begin // self._page_size
        slots = self._slots[layers, :, heads]
        target = np.frombuffer(into, self._slots.dtype).reshape(*slots.shape[:3], token_end - token_begin)
        whole = token_begin % self._page_size == 0 and token_end % self._page_size == 0
        if _in_long_runs(ids):
            for slot, token, count in runs(pages, self._page_size, token_begin, token_end):
                at = token - token_begin
                target[..., at : at + count] = slots[..., slot : slot + count]
        elif whole:
            _take(self._pages[layers, :, heads], ids, self._as_pages(target, 0, len(ids)))
        else:
            at = token_begin - first * self._page_size
            of_tokens = (ids[:, None] * self._page_size + np.arange(self._page_size)).reshape(-1)
            _take(slots, of_tokens[at : at + token_end - token_begin], target)

    def write(
        self, source: memoryview, pages: Sequence[int], layers: slice, heads: slice, token_begin: int, token_end: int
    ) -> None:
        """Copy `source`, [L, 2, H, T] slots without gaps, to tokens [token_begin, token_end) of the room in `pages`.

        Raises:
            IndexError: as for `read`; then nothing is written.
        """
        ids, size = self._ids(pages, token_begin, token_end), self._page_size
        slots = self._slots[layers, :, heads]
        given = np.frombuffer(source, self._slots.dtype).reshape(*slots.shape[:3], token_end - token_begin)
        # Whole pages are [first, last) of the table; what is left over stands in one page before and one behind.
        first, last = -(-token_begin // size), token_end // size
        if first >= last or _in_long_runs(ids):
            self._write_runs(slots, given, pages, token_begin, token_begin, token_end)
            return
        self._write_runs(slots, given, pages, token_begin, token_begin, first * size)
        whole = ids[first - token_begin // size :][: last - first]
        self._pages[layers, :, heads][..., whole] = self._as_pages(given, first * size - token_begin, len(whole))
        self._write_runs(slots, given, pages, token_begin, last * size, token_end)

    def _write_runs(
        self, slots: Bytes, given: Bytes, pages: Sequence[int], given_begin: int, begin: int, end: int
    ) -> None:
        """Write tokens [begin, end) out of `given`, which begins with token `given_begin`."""
        for slot, token, count in runs(pages, self._page_size, begin, end):
            at = token - given_begin
            slots[..., slot : slot + count] = given[..., at : at + count]

    def _as_pages(self, slots: Bytes, at: int, num_pages: int) -> Bytes:
        """Slots [at, at + num_pages * S) of each head as pages; a view."""
        return np.ndarray(
            (*slots.shape[:3], num_pages),
            self._pages.dtype,
            slots,
            at * self._slot_bytes,
            (*slots.strides[:3], self._pages.dtype.itemsize),
        )

    def _ids(self, pages: Sequence[int], token_begin: int, token_end: int) -> NDArray[np.intp]:
        """The pages that hold tokens [token_begin, token_end)."""
        if not 0 <= token_begin < token_end <= len(pages) * self._page_size:
            raise IndexError(f"tokens [{token_begin}, {token_end}) lie outside {len(pages)} pages of {self._page_size}")
        ids = np.array(pages[token_begin // self._page_size : -(-token_end // self._page_size)], np.intp)
        if int(ids.view(np.uintp).max()) >= self._pages.shape[3]:  # a negative id is a large one
            raise IndexError(f"a page of {ids.tolist()} lies outside the pool's {self._pages.shape[3]}")
        return ids


def _take(source: Bytes, ids: NDArray[np.intp], out: Bytes) -> None:
    """Copy items `ids` of the last axis of [L, 2, H, N] to [L, 2, H, len(ids)]."""
    # mode: anything but the default, which would copy twice; the ids were checked.
    if source.flags.c_contiguous:
        np.take(source, ids, axis=3, out=out, mode="clip")
        return
    for at in np.ndindex(source.shape[:3]):  # some heads of all: take would first copy all pages of them
        np.take(source[at], ids, out=out[at], mode="clip")


def _in_long_runs(ids: NDArray[np.intp]) -> bool:
    num_runs = 1 + int(np.count_nonzero(ids[1:] - ids[:-1] != 1))
    return num_runs * PAGES_OF_A_RUN <= len(ids) or num_runs == 1
