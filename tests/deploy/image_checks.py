"""What must not be in the image, found in its files: each finder names what it found, by path below its root."""

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

ENVIRONMENT = Path("opt/kvmesh")
"""What the Dockerfile adds to its base."""
MIB = 2**20

_COMPILER = re.compile(r"(.+-)?(gcc|cc|g\+\+|c\+\+|clang|clang\+\+|cpp|ld|as|make|rustc|nvcc)(-[\d.]+)?")
_PROGRAMS = ("bin", "sbin", "usr/bin", "usr/sbin", "usr/local/bin", "usr/local/sbin", ENVIRONMENT / "bin")
_OF_THE_BUILD = ("src", "opt/tools", "opt/code", "root/.cache", "tmp/*", "mnt/*", "var/cache/kvmesh/*", "opt/**/*.whl")
_TESTS = ("test", "tests", "conftest.py")


def packages_in(root: Path) -> Path:
    """The folder of the installed packages."""
    (packages,) = (root / ENVIRONMENT).glob("lib/python3*/site-packages")
    return packages


def compilers(root: Path) -> list[str]:
    """Programs that compile, assemble or link."""
    programs = (path for folder in _PROGRAMS for path in (root / folder).glob("*"))
    return _named(root, (path for path in programs if _COMPILER.fullmatch(path.name)))


def leftovers(root: Path) -> list[str]:
    """What only the build needed: its folders, caches, wheels, and what installs packages."""
    found = [path for pattern in _OF_THE_BUILD for path in root.glob(pattern)]
    installers = [path for name in ("pip", "setuptools") for path in packages_in(root).glob(f"{name}*")]
    return _named(root, found + installers)


def packaged_tests(root: Path) -> list[str]:
    """Tests of the project or of a package."""
    return _named(root, (p for p in (root / ENVIRONMENT).rglob("*") if p.name in _TESTS))


def unpinned(root: Path, constraints: str) -> list[str]:
    """Installed distributions at another version than constraints.txt has, or unknown to it; but for kvmesh itself."""
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", constraints, re.MULTILINE))
    pinned = {_normal(name): version for name, version in pins.items()}
    installed = (p.name.removesuffix(".dist-info").split("-") for p in packages_in(root).glob("*.dist-info"))
    return sorted(
        f"{name} {version}, not {pinned.get(_normal(name))}"
        for name, version in installed
        if name != "kvmesh" and pinned.get(_normal(name)) != version.partition("+")[0]
    )


def not_compiled(root: Path) -> list[str]:
    """Modules that Python may compile at each start, since it can't write the result down: without bytecode, or with
    bytecode that counts by times of change, which layers don't keep to the second."""
    packages = packages_in(root)
    version = int(packages.parent.name.removeprefix("python3."))
    modules = (path for path in packages.rglob("*.py") if not _is_compiled(path))
    return _named(root, (path for path in modules if _is_written_for(version, path)))


def sizes(root: Path) -> dict[str, int]:
    """Bytes of the whole image, of what the Dockerfile adds, and of each package."""
    parts = {"whole": root, "added": root / ENVIRONMENT}
    parts |= {path.name: path for path in packages_in(root).iterdir() if path.is_dir()}
    return {name: sum(p.lstat().st_size for p in _files(path)) for name, path in parts.items()}


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_symlink() or path.is_file())


def _is_compiled(source: Path) -> bool:
    """Whether there is bytecode that counts unconditionally, which flag 1 alone in its header says (PEP 552)."""
    headers = [p.read_bytes()[:8] for p in source.parent.glob(f"__pycache__/{source.stem}.*.pyc")]
    return [int.from_bytes(header[4:], "little") for header in headers] == [1]


def _is_written_for(version: int, source: Path) -> bool:
    """Whether Python 3.version understands a module: packages bring some for newer ones."""
    try:
        ast.parse(source.read_bytes(), feature_version=(3, version))
    except SyntaxError:
        return False
    return True


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _named(root: Path, paths: Iterable[Path]) -> list[str]:
    return sorted({path.relative_to(root).as_posix() for path in paths})
