"""The image, built from the Dockerfile without an engine and without an index: Debian's buildah, a base made by
debootstrap, and a folder of wheels at the versions of constraints.txt.

What takes long is kept in .cache/image, named by the hash of what it was made from; one test run at a time uses it.
Linux, and root. Where pip's usual torch is a large CUDA build, TORCH_PIP_ARGS chooses another, as in the Makefile.
"""

import fcntl
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic

from image_container import Image
from manifests import ROOT

CACHE = ROOT / ".cache" / "image"
DOCKERFILE = (ROOT / "Dockerfile").read_text()
TOOLS = ("buildah", "debootstrap", "apt-get", "tar", "unshare", "mount", "chroot", "setpriv")
BASE_PACKAGES = "python3,python3-venv"
WHEELS = "/mnt"
"""Where the build sees the folder of wheels: a folder of the base, since one made for this would stay in the image."""


def why_not() -> str | None:
    """Why the image can't be built and run here; None when it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "an image is built and run by root, on Linux"
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"an image needs {', '.join(missing)}"
    if platform.freedesktop_os_release().get("ID") != "debian":
        return "the base is made from a Debian mirror, which is read from the settings of a Debian"
    return None


@contextmanager
def built_image() -> Iterator[Image]:
    """The image, its files mounted; what this leaves behind is the cache alone."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        buildah("rm", "--all")  # of a run that was killed
        name, revision = _image(_base(), _wheels())
        container = buildah("from", name)
        try:
            config = json.loads(buildah("inspect", container))["OCIv1"]["config"]
            yield Image(Path(buildah("mount", container)), config, revision)
        finally:
            buildah("umount", container)
            buildah("rm", container)
        assert buildah("containers", "--quiet") == "", "containers are left"


def argument(name: str) -> str:
    """The default of one of the Dockerfile's arguments."""
    found = re.search(rf'^ARG {name}="?([^"\n]+)"?$', DOCKERFILE, re.MULTILINE)
    assert found is not None, name
    return found.group(1)


def buildah(*arguments: str | Path) -> str:
    """Calls buildah on a storage of our own; what it prints on stdout."""
    return _output(
        *("buildah", "--root", CACHE / "storage", "--runroot", CACHE / "run", "--storage-driver", "vfs"), *arguments
    )


def _output(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{shlex.join(map(str, command))}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
    return done.stdout.strip()


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Says what took how long, to whoever asked pytest to show it."""
    began = monotonic()
    yield
    print(f"{what}: {monotonic() - began:.0f} s")


def _key(*parts: str | bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        content = part.encode() if isinstance(part, str) else part
        digest.update(len(content).to_bytes(8, "big") + content)
    return digest.hexdigest()[:16]


def _python_and_suite() -> tuple[str, str]:
    """Of the base that the Dockerfile names: Debian's own Python there is the same one."""
    found = re.fullmatch(r"python:(\d\.\d+)-slim-(\w+)", argument("BASE_IMAGE"))
    assert found is not None
    return found.group(1), found.group(2)


# The base: a Debian with Python, and nothing else.


def _base() -> str:
    """Its name in the storage."""
    _, suite = _python_and_suite()
    name = f"localhost/kvmesh-base:{_key(suite, BASE_PACKAGES, platform.machine())}"
    if not _is_stored(name):
        folder = CACHE / "base.new"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        with _told("the base"):
            _output(
                *("debootstrap", "--variant=minbase", f"--include={BASE_PACKAGES}"), suite, folder / "root", _mirror()
            )
            for kept in ("var/cache/apt/archives", "var/lib/apt/lists"):
                shutil.rmtree(folder / "root" / kept)
            _output("tar", "-C", folder / "root", "-cf", folder / "root.tar", ".")
            shutil.rmtree(folder / "root")
            (folder / "Dockerfile").write_text("FROM scratch\nADD root.tar /\n")
            buildah("build", "--isolation", "chroot", "--format", "docker", "--tag", name, folder)
        shutil.rmtree(folder)
    return name


def _mirror() -> str:
    """Where this machine's own apt finds Debian."""
    release = platform.freedesktop_os_release()["VERSION_CODENAME"]
    targets = _output("apt-get", "indextargets", "--format", "$(RELEASE) $(REPO_URI)", "Component: main")
    mirrors = [line.split()[1] for line in targets.splitlines() if line.split()[0] == release]
    assert mirrors, f"apt knows no mirror of {release}"
    return mirrors[0]


def _is_stored(name: str) -> bool:
    return name in buildah("images", "--format", "{{.Name}}:{{.Tag}}").splitlines()


# The wheels: torch first and alone, as the Dockerfile has it, then what the rest of it installs.


def _torch_arguments() -> str:
    return os.environ.get("TORCH_PIP_ARGS", argument("TORCH_PIP_ARGS"))


def _wheels() -> Path:
    """The folder that holds them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = [*project["build-system"]["requires"], *project["project"]["dependencies"], "grpcio-tools"]
    needed += project["project"]["optional-dependencies"]["engine"]
    constraints = (ROOT / "constraints.txt").read_text()
    model, (python, _) = argument("MODEL_PIP_ARGS"), _python_and_suite()
    folder = CACHE / f"wheels-{_key(*needed, constraints, _torch_arguments(), model, python, platform.machine())}"
    if not folder.is_dir():
        for old in CACHE.glob("wheels*"):
            shutil.rmtree(old)
        fresh = CACHE / "wheels.new"
        fresh.mkdir()
        pins = fresh / "constraints.txt"
        pins.write_text(re.sub(r"^torch==.*\n", "", constraints, flags=re.MULTILINE))
        with _told("the wheels"):
            _download(fresh, python, "--no-deps", *shlex.split(_torch_arguments()))
            (torch,) = fresh.glob("torch-*.whl")
            _download(fresh, python, "--constraint", pins, torch, *needed)
            _download(fresh, python, "--constraint", pins, *shlex.split(model))
        fresh.rename(folder)
    return folder


def _download(folder: Path, python: str, *arguments: str | Path) -> None:
    _output(
        *(sys.executable, "-m", "pip", "download", "--quiet", "--dest", folder),
        *("--only-binary", ":all:", "--python-version", python),
        *arguments,
    )


# The image itself.


def _image(base: str, wheels: Path) -> tuple[str, str]:
    """Its name in the storage, and the revision it was told."""
    revision = _key(base, wheels.name, *_sources())
    name = f"localhost/kvmesh:{revision}"
    if not _is_stored(name):
        with _told("the image"):
            arguments = {
                "BASE_IMAGE": base,
                "REVISION": revision,
                "TORCH_PIP_ARGS": _torch_arguments(),
                "PIP_NO_INDEX": "1",
                "PIP_FIND_LINKS": WHEELS,
            }
            buildah(
                *("build", "--isolation", "chroot", "--format", "docker", "--volume", f"{wheels}:{WHEELS}:ro"),
                *(word for item in arguments.items() for word in ("--build-arg", "=".join(item))),
                *("--tag", name, ROOT),
            )
    for other in buildah("images", "--format", "{{.Name}}:{{.Tag}}").splitlines():
        if other not in (name, base):
            buildah("rmi", other)
    return name, revision


def _sources() -> Iterator[bytes]:
    """Everything that the build may read: what .dockerignore lets through, and itself."""
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    paths = [ROOT / "Dockerfile", ROOT / ".dockerignore"]
    for path in (ROOT / line.removeprefix("!") for line in ignored if line.startswith("!")):
        paths += sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    for path in paths:
        if "__pycache__" not in path.parts and "_pb2" not in path.name:
            yield path.relative_to(ROOT).as_posix().encode()
            yield path.read_bytes()
