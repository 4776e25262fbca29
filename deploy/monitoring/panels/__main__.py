"""Writes the dashboards: `python deploy/monitoring/panels [directory]`, by default into deploy/monitoring/dashboards.

The JSON is what Grafana reads and what is shipped; this is where it is changed. A test compares the two.
"""

import json
import sys
from pathlib import Path

import members
import overview

HERE = Path(__file__).resolve().parent
DASHBOARDS = (overview.DASHBOARD, members.DASHBOARD)


def main() -> None:
    """Writes one file for each dashboard, named by its uid."""
    directory = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE.parent / "dashboards"
    for dashboard in DASHBOARDS:
        text = json.dumps(dashboard, indent=2, ensure_ascii=False)
        (directory / f"{dashboard['uid']}.json").write_text(f"{text}\n")


if __name__ == "__main__":
    main()
