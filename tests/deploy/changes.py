"""Ways to break manifests, for the tests of what finds them broken."""

from collections.abc import Callable

from manifests import Document, named, template, workloads

Change = Callable[[list[Document]], None]


def within(workload: str, path: str, value: object) -> Change:
    """Sets a field of a workload, or of its pods where the path begins with a dot."""

    def change(documents: list[Document]) -> None:
        (owner,) = [w for w in workloads(documents) if w["metadata"]["name"] == workload]
        put(template(owner)["spec"] if path.startswith(".") else owner, path.strip("."), value)

    return change


def put(place: object, path: str, value: object) -> None:
    *way, last = [int(step) if step.isdigit() else step for step in path.split(".")]
    for step in way:
        place = place[step]  # type: ignore[index]
    place[last] = value  # type: ignore[index]


def of(kind: str, name: str, path: str, value: object) -> Change:
    """Sets a field of any object."""
    return lambda documents: put(named(documents, kind)[name], path, value)


def keeps(budget: str, count: int | str) -> Change:
    """Makes a disruption budget say how many it keeps."""

    def change(documents: list[Document]) -> None:
        spec = named(documents, "PodDisruptionBudget")[budget]["spec"]
        del spec["maxUnavailable"]
        spec["minAvailable"] = count

    return change


def setting(name: str, value: str) -> Change:
    """Sets a setting for all pods."""

    def change(documents: list[Document]) -> None:
        (config,) = [c for c in named(documents, "ConfigMap").values() if "KVMESH_PP_SIZE" in c["data"]]
        config["data"][name] = value

    return change


def variable(workload: str, name: str, value: str) -> Change:
    """Sets a variable of one workload's pods."""

    def change(documents: list[Document]) -> None:
        (owner,) = [w for w in workloads(documents) if w["metadata"]["name"] == workload]
        env = template(owner)["spec"]["containers"][0]["env"]
        env[:] = [v for v in env if v["name"] != name] + [{"name": name, "value": value}]

    return change
