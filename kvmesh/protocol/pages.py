"""The one allocator of a page pool. Rank 0 has one for its pipeline, a decoder one for its own pages; nobody else allocates.

It hands out page ids, prefers one contiguous run (a run is read without gathering), and audits its own books.
"""

from bisect import bisect_left
from collections.abc import Sequence

from kvmesh.protocol.ids import PageId


class Pages:
    """Free pages as sorted, disjoint, non-touching runs [begin, end)."""

    def __init__(self, num_pages: int) -> None:
        """Raises:
        ValueError: num_pages is not positive.
        """
        if num_pages < 1:
            raise ValueError(f"num_pages is {num_pages}; at least 1 is needed")
        self.num_pages = num_pages
        self._begins = [0]
        self._ends = [num_pages]
        self.free = num_pages

    def take(self, count: int) -> tuple[PageId, ...] | None:
        """`count` pages in token order, or None when that many are not free. All or nothing.

        The smallest run that holds them all is used; failing that, the largest runs first.

        Raises:
            ValueError: count is not positive.
        """
        if count < 1:
            raise ValueError(f"cannot take {count} pages")
        if count > self.free:
            return None
        fitting = [(e - b, i) for i, (b, e) in enumerate(zip(self._begins, self._ends, strict=True)) if e - b >= count]
        if fitting:
            return self._cut(min(fitting)[1], count)
        taken: list[PageId] = []
        while len(taken) < count:
            largest = max(range(len(self._begins)), key=lambda i: self._ends[i] - self._begins[i])
            size = self._ends[largest] - self._begins[largest]
            taken += self._cut(largest, min(size, count - len(taken)))
        return tuple(taken)

    def _cut(self, run: int, count: int) -> tuple[PageId, ...]:
        begin = self._begins[run]
        if begin + count == self._ends[run]:
            del self._begins[run], self._ends[run]
        else:
            self._begins[run] = begin + count
        self.free -= count
        return tuple(PageId(p) for p in range(begin, begin + count))

    def give(self, pages: Sequence[PageId]) -> None:
        """Takes pages back.

        Raises:
            ValueError: a page is outside the pool, or free already; nothing is changed.
        """
        if len(set(pages)) != len(pages) or any(self._is_free(p) for p in pages):
            raise ValueError("a page was given back twice")
        for page in pages:
            self._join(page)
        self.free += len(pages)

    def _is_free(self, page: PageId) -> bool:
        if not 0 <= page < self.num_pages:
            raise ValueError(f"page {page} is outside a pool of {self.num_pages}")
        run = bisect_left(self._begins, page + 1) - 1
        return run >= 0 and page < self._ends[run]

    def _join(self, page: PageId) -> None:
        after = bisect_left(self._begins, page)
        touches_before = after > 0 and self._ends[after - 1] == page
        touches_after = after < len(self._begins) and self._begins[after] == page + 1
        if touches_before and touches_after:
            self._ends[after - 1] = self._ends[after]
            del self._begins[after], self._ends[after]
        elif touches_before:
            self._ends[after - 1] = page + 1
        elif touches_after:
            self._begins[after] = page
        else:
            self._begins.insert(after, page)
            self._ends.insert(after, page + 1)

    def check(self, held: Sequence[Sequence[PageId]]) -> None:
        """Audits the books: free and held pages are the pool, each once.

        Raises:
            ValueError: they are not.
        """
        seen = [p for pages in held for p in pages]
        seen += [PageId(p) for b, e in zip(self._begins, self._ends, strict=True) for p in range(b, e)]
        if sorted(seen) != list(range(self.num_pages)) or self.free != sum(self._ends) - sum(self._begins):
            raise ValueError("free and held pages are not the whole pool, each once")


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that hold `tokens` tokens."""
    return -(-tokens // page_size)
