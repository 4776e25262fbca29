"""A dashboard as Grafana's classic JSON model has it: variables, and rows of panels on its grid. Knows nothing of kvmesh."""

from collections.abc import Sequence
from dataclasses import dataclass

from grafana import DATASOURCE, Json

SCHEMA_VERSION = 41
"""Of Grafana 12.0; later ones migrate what they read."""
COLUMNS = 24


@dataclass(frozen=True)
class Row:
    """Panels side by side under a heading, each with its width; they wrap where a line is full."""

    title: str
    height: int
    panels: Sequence[tuple[int, Json]]


def variable(name: str, label: str, query: str, *, many: bool) -> Json:
    """A choice among label values.

    Args:
        many: whether several can be chosen, or all, which is the default.
    """
    told: Json = {
        "type": "query",
        "name": name,
        "label": label,
        "datasource": DATASOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,  # whenever the time range changes
        "sort": 1,
        "multi": many,
        "includeAll": many,
        "options": [],
        "current": {},
    }
    if many:
        told |= {"allValue": ".*", "current": {"selected": True, "text": ["All"], "value": ["$__all"]}}
    return told


def dashboard(
    uid: str, title: str, description: str, *, tag: str, variables: Sequence[Json], rows: Sequence[Row]
) -> Json:
    """A whole dashboard; those with the same tag link to each other."""
    source = {"type": "datasource", "name": "datasource", "label": "Data source", "query": "prometheus", "current": {}}
    link = {
        "type": "dashboards",
        "title": tag,
        "tags": [tag],
        "includeVars": True,
        "keepTime": True,
        "asDropdown": False,
    }
    return {
        "uid": uid,
        "title": title,
        "description": description,
        "tags": [tag],
        "schemaVersion": SCHEMA_VERSION,
        "editable": True,
        "graphTooltip": 1,  # one crosshair for all panels
        "time": {"from": "now-30m", "to": "now"},
        "refresh": "30s",
        "timezone": "browser",
        "links": [link],
        "annotations": {"list": []},
        "templating": {"list": [source, *variables]},
        "panels": _placed(rows),
    }


def _placed(rows: Sequence[Row]) -> list[Json]:
    panels: list[Json] = []
    y = 0
    for row in rows:
        heading = {"type": "row", "title": row.title, "collapsed": False, "panels": []}
        panels.append(_at(heading, len(panels) + 1, 0, y, COLUMNS, 1))
        x, y = 0, y + 1
        for width, panel in row.panels:
            if x + width > COLUMNS:
                x, y = 0, y + row.height
            panels.append(_at(panel, len(panels) + 1, x, y, width, row.height))
            x += width
        y += row.height
    return panels


def _at(panel: Json, number: int, x: int, y: int, width: int, height: int) -> Json:
    return {"id": number, "gridPos": {"x": x, "y": y, "w": width, "h": height}} | panel
