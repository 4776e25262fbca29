"""Whether a document is what its API takes, to the letter: Kubernetes' own kinds by its schemas, others by those here.

Those of the others say only what the manifests here use; a field that is not in them fails, so that a typo can't pass
for one. What they hold of Kubernetes' own (pod templates, scaling behaviour) goes through Kubernetes' schemas.
"""

import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml
from manifests import Document

VERSIONS = ("1.31", "1.34", "1.37")
"""The oldest that the README names, the oldest that is still supported upstream, the newest there are schemas for."""

PROMTOOL = shutil.which("promtool")


def check(document: Document, version: str) -> None:
    """Raises:
    jsonschema.ValidationError: a field is unknown, missing or of another kind.
    kubernetes_validate.SchemaNotFoundError: a kind that neither Kubernetes nor this file knows.
    """
    own = OWN.get((document["apiVersion"], document["kind"]))
    if own is None:
        assert kubernetes_validate.validate(document, version, strict=True) == version
        return
    schema, inside = own
    jsonschema.validate(document, schema)
    inside(document, version)


def closed(required: dict[str, Any], optional: dict[str, Any] | None = None) -> Document:
    """An object of these fields and no others."""
    properties = required | (optional or {})
    return {"type": "object", "properties": properties, "required": [*required], "additionalProperties": False}


TEXT, COUNT, ANY = {"type": "string", "minLength": 1}, {"type": "integer", "minimum": 0}, {}
TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
METADATA = closed({"name": TEXT}, {"namespace": TEXT, "labels": TEXTS, "annotations": TEXTS})


def listed(item: Document) -> Document:
    return {"type": "array", "items": item, "minItems": 1}


def one_of(*words: str) -> Document:
    return {"enum": list(words)}


def kind(spec: Document) -> Document:
    return closed({"apiVersion": TEXT, "kind": TEXT, "metadata": METADATA, "spec": spec})


SCALED_OBJECT = kind(
    closed(
        {
            "scaleTargetRef": closed({"apiVersion": TEXT, "kind": TEXT, "name": TEXT}),
            "minReplicaCount": {"type": "integer", "minimum": 1},
            "maxReplicaCount": {"type": "integer", "minimum": 2},
            "triggers": listed(
                closed(
                    {
                        "type": one_of("prometheus"),
                        "metricType": one_of("AverageValue"),
                        # KEDA's own default for ignoreNullValues makes an empty answer 0, and so the least.
                        "metadata": closed(
                            {
                                "serverAddress": TEXT,
                                "query": TEXT,
                                "threshold": TEXT,
                                "ignoreNullValues": one_of("false"),
                            }
                        ),
                    }
                )
            ),
        },
        {
            "fallback": closed(
                {"failureThreshold": COUNT, "replicas": COUNT},
                {"behavior": one_of("static", "currentReplicas", "currentReplicasIfHigher", "currentReplicasIfLower")},
            ),
            "advanced": closed({"horizontalPodAutoscalerConfig": closed({"behavior": ANY})}),
        },
    )
)


def inside_scaled_object(document: Document, version: str) -> None:
    """The HorizontalPodAutoscaler that KEDA would make of it, and its queries."""
    spec = document["spec"]
    autoscaler = {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": document["metadata"],
        "spec": {
            "scaleTargetRef": spec["scaleTargetRef"],
            "minReplicas": spec["minReplicaCount"],
            "maxReplicas": spec["maxReplicaCount"],
            "behavior": spec.get("advanced", {}).get("horizontalPodAutoscalerConfig", {}).get("behavior", {}),
        },
    }
    kubernetes_validate.validate(autoscaler, version, strict=True)
    queries = [{"record": f"query:{n}", "expr": t["metadata"]["query"]} for n, t in enumerate(spec["triggers"])]
    read_by_promtool(document["metadata"]["name"], {"groups": [{"name": "queries", "rules": queries}]})


POD_MONITOR = kind(
    closed(
        {
            "selector": closed({"matchLabels": TEXTS}),
            "podMetricsEndpoints": listed(
                closed(
                    {"port": TEXT},
                    {
                        "interval": TEXT,
                        "scrapeTimeout": TEXT,
                        "relabelings": listed(
                            closed({"targetLabel": TEXT}, {"sourceLabels": listed(TEXT), "replacement": TEXT})
                        ),
                    },
                )
            ),
        }
    )
)

PROMETHEUS_RULE = kind(closed({"groups": listed({"type": "object"})}))


def inside_prometheus_rule(document: Document, version: str) -> None:
    """The spec of a PrometheusRule is a file of rules."""
    read_by_promtool(document["metadata"]["name"], document["spec"])


def read_by_promtool(name: str, rules: Document) -> None:
    """Lets promtool read rules, where there is one."""
    if PROMTOOL is None:
        return
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "rules.yaml"
        file.write_text(yaml.safe_dump(rules), encoding="utf-8")
        done = subprocess.run(
            [PROMTOOL, "check", "rules", file], capture_output=True, text=True, timeout=30, check=False
        )
    if done.returncode:
        raise jsonschema.ValidationError(f"{name}: {done.stdout}{done.stderr}")


LEADER_WORKER_SET = kind(
    closed(
        {
            "leaderWorkerTemplate": closed(
                {
                    "size": {"type": "integer", "minimum": 1},
                    "workerTemplate": {"type": "object"},
                    "restartPolicy": one_of("None", "RecreateGroupOnPodRestart", "RecreateGroupAfterStart"),
                }
            ),
        },
        {
            "replicas": COUNT,
            "startupPolicy": one_of("LeaderCreated", "LeaderReady"),
            "networkConfig": closed({"subdomainPolicy": one_of("Shared", "UniquePerReplica")}),
            "rolloutStrategy": closed(
                {"type": one_of("RollingUpdate")},
                {"rollingUpdateConfiguration": closed({"maxUnavailable": COUNT, "maxSurge": COUNT})},
            ),
        },
    )
)


def inside_leader_worker_set(document: Document, version: str) -> None:
    """Its pod template, as a Pod."""
    worker = document["spec"]["leaderWorkerTemplate"]["workerTemplate"]
    metadata = {"name": document["metadata"]["name"], **worker["metadata"]}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        **{k: v for k, v in worker.items() if k != "metadata"},
    }
    kubernetes_validate.validate(pod, version, strict=True)


def nothing_inside(document: Document, version: str) -> None:
    """All of it is in the schema."""


OWN: dict[tuple[str, str], tuple[Document, Callable[[Document, str], None]]] = {
    ("keda.sh/v1alpha1", "ScaledObject"): (SCALED_OBJECT, inside_scaled_object),
    ("monitoring.coreos.com/v1", "PodMonitor"): (POD_MONITOR, nothing_inside),
    ("monitoring.coreos.com/v1", "PrometheusRule"): (PROMETHEUS_RULE, inside_prometheus_rule),
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): (LEADER_WORKER_SET, inside_leader_worker_set),
}
"""Every kind that is not Kubernetes' own; another one fails until it stands here."""
