"""The rows of `kvmesh trace` as lines of a terminal of any width, each with its place on one time line.

    prefill p0/0    prefill             12.1      30.0     ━━━━━━━        tokens 100
                      stage_lost: rank 1 of p0 was lost

An error has a line of its own. What does not fit beside the time line goes below its span: first the notes, then the process
goes above.
"""

from collections.abc import Iterator, Sequence

from rich.cells import cell_len, set_cell_size
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from kvmesh.cli.spans import Row

MIN_BAR_COLUMNS = 10
_GAP = "  "
_MOST_COLUMNS = 32
"""Of a process and of a span's name: longer ones are cut."""
_MOST_DEPTH = 8
"""To which parts are indented."""
_COLORS = {"gateway": "cyan", "bootstrap": "magenta", "decode": "green", "prefill": "yellow"}


def drawn(found: Sequence[Row], width: int) -> Group:
    """The waterfall, in so many columns."""
    return Group(*_Waterfall(found, width).lines())


class _Waterfall:
    """What goes where."""

    def __init__(self, found: Sequence[Row], width: int) -> None:
        self._found = found
        self._whole = max((row.ended for row in found), default=0.0) or 1.0
        self._scale = f"0 … {self._whole * 1e3:.1f} ms"
        self._process_columns = _columns(["process", *(row.process for row in found)])
        self._name_columns = _columns(["span", *(_indented(row) for row in found)])
        notes_columns = max((cell_len(_notes(row)) for row in found), default=0)
        numbers_columns = cell_len(_numbers("", "")) + len(_GAP)
        left = width - self._name_columns - len(_GAP) - numbers_columns
        least = max(MIN_BAR_COLUMNS, cell_len(self._scale))
        self._process_beside = left - self._process_columns - len(_GAP) >= least
        if self._process_beside:
            left -= self._process_columns + len(_GAP)
        self._notes_beside = left - notes_columns - len(_GAP) >= least
        if self._notes_beside:
            left -= notes_columns + len(_GAP)
        self._bar_columns = max(MIN_BAR_COLUMNS, left)

    def lines(self) -> Iterator[RenderableType]:
        """Top down."""
        yield _line(self._beside("process"), self._named("span"), _numbers("begins ms", "takes ms"), self._scale)
        above = ""
        for row in self._found:
            if not self._process_beside and row.process != above:
                above = row.process
                yield Text(above, style=_color(row), no_wrap=True, overflow="ellipsis")
            yield from self._of(row)

    def _of(self, row: Row) -> Iterator[RenderableType]:
        notes, indent = _notes(row), len(self._beside("")) + 2 * min(row.depth, _MOST_DEPTH) + 2
        numbers = _numbers(f"{row.begun * 1e3:.1f}", f"{row.seconds * 1e3:.1f}")
        line = _line(self._beside(row.process), self._named(_indented(row)), numbers)
        line.stylize(_color(row), 0, len(self._beside(row.process)))
        line.append(_GAP + bar(row, self._whole, self._bar_columns), style="red" if row.error else _color(row))
        if self._notes_beside:
            line.append(_GAP + notes)
        line.rstrip()
        yield line
        if notes and not self._notes_beside:
            yield Padding(Text(notes, style="dim"), (0, 0, 0, indent), expand=False)
        if row.error:
            yield Padding(Text(row.error, style="red"), (0, 0, 0, indent), expand=False)

    def _beside(self, process: str) -> str:
        return set_cell_size(process, self._process_columns) + _GAP if self._process_beside else ""

    def _named(self, name: str) -> str:
        return set_cell_size(name, self._name_columns)


def bar(row: Row, whole_seconds: float, columns: int) -> str:
    """A span's place on the time line; the shortest still shows."""
    scale = columns / whole_seconds
    begin = min(columns - 1, int(row.begun * scale))
    return (" " * begin + "━" * max(1, min(columns, round(row.ended * scale)) - begin)).ljust(columns)


def _line(process: str, name: str, *cells: str) -> Text:
    return Text(process + _GAP.join([name, *cells]), no_wrap=True, overflow="crop")


def _numbers(begun: str, seconds: str) -> str:
    return f"{begun:>9}{_GAP}{seconds:>8}"


def _columns(texts: Sequence[str]) -> int:
    return min(_MOST_COLUMNS, max(cell_len(text) for text in texts))


def _indented(row: Row) -> str:
    return "  " * min(row.depth, _MOST_DEPTH) + row.name


def _notes(row: Row) -> str:
    return ", ".join(f"{name} {value}" for name, value in sorted(row.attributes.items()))


def _color(row: Row) -> str:
    return _COLORS.get(row.process.partition(" ")[0], "white")
