"""Panels as Grafana's classic JSON model has them, each without its place on the dashboard. Knows nothing of kvmesh."""

from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Any

Json = dict[str, Any]

DATASOURCE: Json = {"type": "prometheus", "uid": "${datasource}"}

_OF_KUBERNETES = ("container", "endpoint", "namespace", "pod")
"""Labels that discovery in a cluster adds to every series; `instance` is the pod there."""

GREEN, YELLOW, ORANGE, RED, BLUE = "green", "yellow", "orange", "red", "blue"


@dataclass(frozen=True)
class Query:
    """PromQL, and how its series are called."""

    expr: str
    legend: str = ""
    exemplar: bool = False
    """Whether dots show single observations."""


def timeseries(
    title: str,
    description: str,
    unit: str,
    *queries: Query,
    stack: bool = False,
    bars: bool = False,
    limits: Sequence[tuple[float, str]] = (),
    overrides: Sequence[Json] = (),
    most: float | None = None,
) -> Json:
    """Lines over time; stacked areas, or bars for what happens now and then.

    Args:
        limits: from which value on which colour; drawn as lines.
        most: the top of the axis.
    """
    custom = {
        "drawStyle": "bars" if bars else "line",
        "lineWidth": 1,
        "fillOpacity": 60 if stack or bars else 8,
        "showPoints": "never",
        "stacking": {"mode": "normal" if stack or bars else "none", "group": "A"},
        "thresholdsStyle": {"mode": "dashed" if limits else "off"},
    }
    panel = _panel("timeseries", title, description, unit, queries, limits=limits, most=most)
    panel["fieldConfig"]["defaults"] |= {"custom": custom, "color": {"mode": "palette-classic"}}
    panel["fieldConfig"]["overrides"] = list(overrides)
    panel["options"] = {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    return panel


def stat(
    title: str,
    description: str,
    unit: str,
    query: Query,
    *,
    limits: Sequence[tuple[float, str]] = (),
    base: str = GREEN,
    named: bool = False,
    decimals: int | None = None,
) -> Json:
    """One figure.

    Args:
        base: its colour below the first limit.
        named: whether the name of the series stands with it: then as of now, for over time it may be several.
    """
    panel = _panel("stat", title, description, unit, [query], limits=limits, base=base, instant=named)
    if decimals is not None:
        panel["fieldConfig"]["defaults"]["decimals"] = decimals
    panel["options"] = {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "colorMode": "value",
        "graphMode": "area",
        "textMode": "value_and_name" if named else "value",
        "orientation": "auto",
    }
    return panel


def bar_gauge(title: str, description: str, unit: str, query: Query) -> Json:
    """One bar for each series, as the query orders them; each with its own colour."""
    panel = _panel("bargauge", title, description, unit, [query], instant=True)
    panel["fieldConfig"]["defaults"]["color"] = {"mode": "palette-classic"}
    panel["options"] = {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "orientation": "horizontal",
        "displayMode": "basic",
        "showUnfilled": True,
        "valueMode": "color",
    }
    return panel


def bands(
    title: str,
    description: str,
    unit: str,
    query: Query,
    *,
    limits: Sequence[tuple[float, str]],
    base: str = GREEN,
    texts: Sequence[tuple[int, str]] = (),
) -> Json:
    """One band for each series over time, coloured by its value.

    Args:
        texts: what stands for a value.
    """
    panel = _panel("state-timeline", title, description, unit, [query], limits=limits, base=base)
    panel["fieldConfig"]["defaults"] |= {
        "custom": {"fillOpacity": 80, "lineWidth": 0},
        "mappings": [{"type": "value", "options": {str(value): {"text": text} for value, text in texts}}]
        if texts
        else [],
    }
    panel["options"] = {
        "mergeValues": True,
        "showValue": "auto",
        "rowHeight": 0.85,
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": False},
        "tooltip": {"mode": "multi"},
    }
    return panel


@dataclass(frozen=True)
class Column:
    """A column of figures in a table: a query that answers one row for each set of labels."""

    title: str
    expr: str
    unit: str
    limits: Sequence[tuple[float, str]] = ()
    base: str = GREEN
    gauge: bool = False
    """Shown as a bar, from 0 to 1."""


def table(title: str, description: str, labels: Sequence[str], *columns: Column, sort: str | None = None) -> Json:
    """One row for each set of labels, one column for each query.

    Args:
        labels: those that are shown, first; the queries must answer with equal label sets.
        sort: the title of the column by which rows are sorted, largest first.
    """
    letters = ascii_uppercase[: len(columns)]
    panel = _panel("table", title, description, "none", [Query(c.expr) for c in columns], instant=True)
    for target in panel["targets"]:
        target["format"] = "table"
    # With one query Grafana names the figure "Value", with more "Value #A" and so on.
    names = ["Value"] if len(columns) == 1 else [f"Value #{letter}" for letter in letters]
    hidden = dict.fromkeys(("Time", "__name__", "job", *_OF_KUBERNETES), True)
    panel["transformations"] = [
        {"id": "merge", "options": {}},
        {
            "id": "organize",
            "options": {
                "excludeByName": hidden,
                "indexByName": {name: place for place, name in enumerate([*labels, *names])},
                "renameByName": {name: column.title for name, column in zip(names, columns, strict=True)},
            },
        },
    ]
    panel["fieldConfig"]["overrides"] = [_column(column) for column in columns]
    sort_by = [] if sort is None else [{"displayName": sort, "desc": True}]
    panel["options"] = {"showHeader": True, "cellHeight": "sm", "sortBy": sort_by}
    return panel


def _column(column: Column) -> Json:
    properties: Json = {"unit": column.unit, "thresholds": _thresholds(column.limits, column.base)}
    if column.gauge:
        properties |= {"min": 0, "max": 1, "custom.cellOptions": {"type": "gauge", "mode": "basic"}}
    elif column.limits:
        properties |= {"custom.cellOptions": {"type": "color-text"}}
    return _override({"id": "byName", "options": column.title}, properties)


def line_over_stack(name: str, colour: str) -> Json:
    """An override: the series of this name is a line on its own, over the stacked ones."""
    properties = {
        "custom.stacking": {"mode": "none"},
        "custom.fillOpacity": 0,
        "custom.lineWidth": 2,
        "custom.lineStyle": {"fill": "dash", "dash": [8, 6]},
        "color": {"mode": "fixed", "fixedColor": colour},
    }
    return _override({"id": "byName", "options": name}, properties)


def on_the_right(pattern: str, unit: str) -> Json:
    """An override: series whose name matches have an axis of their own, on the right."""
    return _override({"id": "byRegexp", "options": pattern}, {"unit": unit, "custom.axisPlacement": "right"})


def _override(matcher: Json, properties: Json) -> Json:
    return {"matcher": matcher, "properties": [{"id": key, "value": value} for key, value in properties.items()]}


def _panel(
    kind: str,
    title: str,
    description: str,
    unit: str,
    queries: Sequence[Query],
    *,
    limits: Sequence[tuple[float, str]] = (),
    base: str = GREEN,
    most: float | None = None,
    instant: bool = False,
) -> Json:
    # Said everywhere: without it a state timeline colours from green to red by size, whatever the limits say.
    colour = {"mode": "thresholds"}
    defaults: Json = {"unit": unit, "min": 0, "color": colour, "thresholds": _thresholds(limits, base)}
    if most is not None:
        defaults["max"] = most
    return {
        "type": kind,
        "title": title,
        "description": description,
        "datasource": DATASOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": [_target(letter, query, instant) for letter, query in zip(ascii_uppercase, queries, strict=False)],
    }


def _thresholds(limits: Sequence[tuple[float, str]], base: str) -> Json:
    steps: list[Json] = [{"color": base, "value": None}]
    return {"mode": "absolute", "steps": steps + [{"color": colour, "value": value} for value, colour in limits]}


def _target(letter: str, query: Query, instant: bool) -> Json:
    return {
        "refId": letter,
        "datasource": DATASOURCE,
        "editorMode": "code",
        "expr": query.expr,
        "legendFormat": query.legend or "__auto",
        "instant": instant,
        "range": not instant,
        "exemplar": query.exemplar,
    }
