"""Draws what `python -m bench.bootstrap_order --json` printed; the only module here that needs matplotlib.

python -m bench.bootstrap_order --json | python -m bench.bootstrap_order.plot docs/bootstrap-order.png
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullLocator

INK, MUTED, GRID = "#1f2733", "#6b7280", "#e5e7eb"
LOOKS = {
    "independent": ("independent", "#c2410c", "o"),
    "last_first": ("last first", "#e0962f", "s"),
    "ring": ("ring", "#3b6fb6", "D"),
    "kvmesh": ("kvmesh", "#0f766e", "o"),
}
"""Protocol → name, colour, marker."""
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
LABEL_POINTS = 11.0
"""Two labels at the lines' ends keep at least so many points apart."""

Rows = Mapping[str, Mapping[str, float]]


def _axes(axes: Axes, sizes: Sequence[str], title: str, subtitle: str) -> None:
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", pad=26)
    axes.text(0, 1.035, subtitle, transform=axes.transAxes, color=MUTED, fontsize=9)
    axes.set_xticks(range(len(sizes)), sizes)
    axes.set_xlim(-0.2, len(sizes) - 0.85)
    axes.set_xlabel("pipeline stages")
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0)


def _line(axes: Axes, protocol: str, values: Sequence[float], *, faint: bool = False) -> None:
    _, colour, marker = LOOKS[protocol]
    look: dict[str, Any] = {"linewidth": 1.1, "linestyle": (0, (2, 2)), "alpha": 0.75} if faint else {"linewidth": 2.2}
    if not faint:
        look |= {"marker": marker, "markersize": 6, "markeredgecolor": "white", "markeredgewidth": 1}
    axes.plot(range(len(values)), values, color=colour, zorder=4 if protocol == "kvmesh" else 3, clip_on=False, **look)


def _labels(axes: Axes, ends: Mapping[str, float], suffix: str = "") -> None:
    """Names at the right end of each line, pushed apart where they would touch."""
    pixels = {p: axes.transData.transform((0, value))[1] for p, value in ends.items()}
    space = LABEL_POINTS * axes.figure.dpi / 72
    lowest = -float("inf")
    for protocol in sorted(pixels, key=lambda p: (pixels[p], p != "kvmesh")):
        place = max(pixels[protocol], lowest + space)
        lowest = place
        name, colour, _ = LOOKS[protocol]
        axes.annotate(
            name + (suffix if ends[protocol] == 0 else ""),
            xy=(1, axes.transAxes.inverted().transform((0, place))[1]),
            xycoords="axes fraction",
            xytext=(2, 0),
            textcoords="offset points",
            color=colour,
            fontweight="bold",
            va="center",
            annotation_clip=False,
        )


def _divergent(axes: Axes, results: Mapping[str, Rows], sizes: Sequence[str]) -> None:
    _axes(
        axes,
        sizes,
        "Rooms on which stages diverged",
        "per 1000 requests; in the field, each one stops the pipeline",
    )
    ends = {}
    for protocol in LOOKS:
        rows = [results[protocol][size] for size in sizes]
        values = [1000 * row["divergent"] / row["requests"] for row in rows]
        _line(axes, protocol, values)
        ends[protocol] = values[-1]
    axes.set_ylim(bottom=0)
    _labels(axes, ends, suffix=": 0")


def _admission(axes: Axes, results: Mapping[str, Rows], sizes: Sequence[str]) -> None:
    _axes(
        axes,
        sizes,
        "Admission, in mean round trips",
        "decoder has reserved → rank 0 begins the room; solid p50, dotted p99",
    )
    ends = {}
    for protocol in LOOKS:
        rows = [results[protocol][size] for size in sizes]
        _line(axes, protocol, [row["admission_rtts_p50"] for row in rows])
        _line(axes, protocol, [row["admission_rtts_p99"] for row in rows], faint=True)
        ends[protocol] = rows[-1]["admission_rtts_p50"]
    axes.set_yscale("log")
    axes.set_yticks([0.5, 1, 2, 5, 10, 20])
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(_plain))
    _labels(axes, ends)


def _plain(value: float, _: int) -> str:
    return f"{value:g}"


def draw(results: Mapping[str, Any], path: str) -> None:
    """Writes a PNG of what the comparison printed."""
    sizes = list(results["kvmesh"])
    panels: tuple[Callable[[Axes, Mapping[str, Rows], Sequence[str]], None], ...] = (_divergent, _admission)
    with mpl.rc_context(STYLE):
        figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.6), dpi=160)
        figure.subplots_adjust(left=0.05, right=0.905, top=0.83, bottom=0.2, wspace=0.38)
        for panel, place in zip(panels, axes, strict=True):
            panel(place, results, sizes)
        figure.text(0.05, 0.035, _conditions(results), color=MUTED, fontsize=8.5)
        figure.savefig(path)
        pyplot.close(figure)


def _conditions(results: Mapping[str, Any]) -> str:
    requests = results["kvmesh"][next(iter(results["kvmesh"]))]["requests"]
    return (
        f"{requests} requests each, seed {results['seed']} ff.; {results['abort_rate']:.0%} aborted; decoder to stage "
        f"{results['latency']} s, mean round trip {1000 * results['rtt_seconds']:.0f} ms; "
        f"full step {1000 * results['step_seconds']:.0f} ms on each stage"
    )


def main() -> int:
    """Reads the last line of standard input, writes the file."""
    parser = argparse.ArgumentParser(prog="python -m bench.bootstrap_order.plot", description=__doc__)
    parser.add_argument("png", help="the file to write")
    options = parser.parse_args()
    mpl.use("agg")
    draw(json.loads(sys.stdin.read().splitlines()[-1]), options.png)
    return 0


if __name__ == "__main__":
    sys.exit(main())
