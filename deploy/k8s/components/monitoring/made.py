"""Writes the two files of this component that are made from others: `python deploy/k8s/components/monitoring/made.py`.

`--runbooks URL` puts an address before the path that each alert's `runbook_url` is, so that Alertmanager shows a link; without
it the path stays a path, as no one knows where you keep this repository.

The operator wants rules inside a PrometheusRule, and kustomize puts no file inside an object, so `rules.yaml` repeats
deploy/monitoring/rules in the operator's words. Dashboards stay where they are; their kustomization lists them, since
kustomize knows no wildcards and reads no file above its own directory. A test fails while either is not what this would
write.
"""

import argparse
from pathlib import Path

MONITORING = Path(__file__).resolve().parents[3] / "monitoring"
RULES = Path(__file__).with_name("rules.yaml")
DASHBOARDS = MONITORING / "dashboards" / "kustomization.yaml"

_NOTE = "# Written by deploy/k8s/components/monitoring/made.py from {}; change it there.\n"
_RULE = """apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: {name}
  labels:
    app.kubernetes.io/part-of: kvmesh
spec:
"""
_DASHBOARDS = """apiVersion: kustomize.config.k8s.io/v1alpha1
kind: Component
configMapGenerator:{none}
"""
_DASHBOARD = """  - name: {name}-dashboard
    files: [{file}]
    options:
      # Grafana's sidecar finds dashboards by this label and reads them by their own uid, so the name needs no hash.
      labels: {{ grafana_dashboard: "1", app.kubernetes.io/part-of: kvmesh }}
      disableNameSuffixHash: true
"""


def rules(monitoring: Path = MONITORING, runbooks: str = "") -> str:
    """A PrometheusRule for each file of rules.

    Args:
        runbooks: what stands before the paths of runbooks, e.g. "https://git.example.org/kvmesh/blob/main/".
    """
    files = sorted((monitoring / "rules").glob("*.yaml"))
    texts = [f.read_text(encoding="utf-8").replace("runbook_url: ", f"runbook_url: {runbooks}") for f in files]
    documents = [_RULE.format(name=_name(f)) + _indented(text) for f, text in zip(files, texts, strict=True)]
    return _NOTE.format("deploy/monitoring/rules") + "---\n".join(documents)


def dashboards(monitoring: Path = MONITORING) -> str:
    """A kustomization that makes a ConfigMap of each dashboard."""
    files = sorted((monitoring / "dashboards").glob("*.json"))
    maps = [_DASHBOARD.format(name=_name(file), file=file.name) for file in files]
    top = _DASHBOARDS.format(none="" if maps else " []")
    return _NOTE.format("the dashboards beside it") + top + "".join(maps)


def _name(file: Path) -> str:
    """For an object: kvmesh-alerts of alerts.rules.yaml, kvmesh-mesh of kvmesh-mesh.json."""
    word = file.name.split(".")[0].replace("_", "-").lower()
    return word if word.startswith("kvmesh") else f"kvmesh-{word}"


def _indented(text: str) -> str:
    lines = [f"  {line}" if line.strip() else "" for line in text.splitlines()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Writes rules.yaml, and the kustomization of the dashboards.")
    parser.add_argument("--runbooks", default="", metavar="URL", help="put before docs/operations.md in runbook_url")
    RULES.write_text(rules(runbooks=parser.parse_args().runbooks), encoding="utf-8")
    DASHBOARDS.write_text(dashboards(), encoding="utf-8")
