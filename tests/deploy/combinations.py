"""The combinations of components that deploy/k8s/README.md promises, rendered from a copy of the manifests."""

import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import yaml
from manifests import K8S, OVERLAYS, ROOT, Document, render

_HEAD = "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\nnamespace: kvmesh\nresources: [../../base]\n"


def documented() -> list[tuple[str, ...]]:
    """Each line of the README's list of combinations: components, in their order."""
    text = (K8S / "README.md").read_text(encoding="utf-8")
    block = re.search(r"<!-- combinations -->\n\n(.*?)\n\n<!-- end -->", text, re.DOTALL)
    assert block is not None
    return [tuple(line.split()) for line in block.group(1).splitlines()]


@cache
def combined(components: tuple[str, ...]) -> list[Document]:
    """The base with some components; don't change what it returns."""
    return _with_kustomization(_HEAD + yaml.safe_dump(_components(components)))


def with_labels(components: tuple[str, ...], labels: Mapping[str, str]) -> list[Document]:
    """The base with some components, in an overlay that puts labels on everything, selectors included."""
    labelled = {"labels": [{"pairs": dict(labels), "includeSelectors": True}]}
    return _with_kustomization(_HEAD + yaml.safe_dump(_components(components) | labelled))


@cache
def rendered(name: str) -> list[Document]:
    """The base or an overlay; don't change what it returns."""
    return render(K8S / ("base" if name == "base" else f"overlays/{name}"))


@cache
def production_without(left_out: tuple[str, ...]) -> list[Document]:
    """The production overlay, some of its components left out."""
    production = K8S / "overlays" / "production"
    kustomization = yaml.safe_load((production / "kustomization.yaml").read_text(encoding="utf-8"))
    unwanted = [f"../../components/{name}" for name in left_out]
    assert set(unwanted) <= set(kustomization["components"])
    kustomization["components"] = [c for c in kustomization["components"] if c not in unwanted]
    return _with_kustomization(yaml.safe_dump(kustomization), production.glob("*.yaml"))


def _components(components: tuple[str, ...]) -> dict[str, list[str]]:
    return {"components": [f"../../components/{c}" for c in components]}


def _with_kustomization(text: str, beside: Sequence[Path] = ()) -> list[Document]:
    """Renders an overlay of this text in a copy of deploy/, for kustomize reads no absolute paths."""
    with tempfile.TemporaryDirectory() as directory:
        copy = shutil.copytree(ROOT / "deploy", Path(directory) / "deploy")
        overlay = copy / "k8s" / "overlays" / "combined"
        overlay.mkdir()
        for file in beside:
            shutil.copy(file, overlay)
        (overlay / "kustomization.yaml").write_text(text, encoding="utf-8")
        return render(overlay)


def everything() -> dict[str, list[Document]]:
    """The base, the overlays and the documented combinations, by name."""
    return {name: rendered(name) for name in ("base", *OVERLAYS)} | {" ".join(c): combined(c) for c in documented()}
