"""What looks for things that must not be in the image finds them: each finder on a small tree of files."""

import py_compile
import subprocess
import sys
from pathlib import Path
from py_compile import PycInvalidationMode

import pytest
from image_checks import compilers, leftovers, not_compiled, packaged_tests, packages_in, sizes, unpinned
from image_container import mounts_below, processes_in

reads_proc = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
PACKAGES = "opt/kvmesh/lib/python3.11/site-packages"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An image with one package and nothing wrong."""
    (tmp_path / "usr/bin").mkdir(parents=True)
    (tmp_path / "usr/bin/ldd").touch()
    put(tmp_path, f"{PACKAGES}/one/__init__.py", "ONE = 1\n")
    put(tmp_path, f"{PACKAGES}/one-1.0.dist-info/METADATA")
    compiled(tmp_path, PycInvalidationMode.UNCHECKED_HASH)
    return tmp_path


def compiled(root: Path, mode: PycInvalidationMode) -> None:
    py_compile.compile(str(packages_in(root) / "one/__init__.py"), invalidation_mode=mode)


def put(root: Path, name: str, text: str = "") -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def test_nothing_is_found_where_nothing_is_wrong(root: Path) -> None:
    assert compilers(root) == leftovers(root) == packaged_tests(root) == not_compiled(root) == []
    assert unpinned(root, "one==1.0\n") == []


@pytest.mark.parametrize(
    "name", ["gcc", "x86_64-linux-gnu-gcc-12", "cc", "g++", "clang-14", "ld", "as", "make", "nvcc"]
)
def test_a_compiler_is_found(root: Path, name: str) -> None:
    put(root, f"usr/bin/{name}")
    assert compilers(root) == [f"usr/bin/{name}"]


@pytest.mark.parametrize(
    "name",
    ["src", "opt/tools", "root/.cache", "tmp/constraints.txt", "mnt/one.whl", "opt/one.whl", f"{PACKAGES}/pip"],
)
def test_what_the_build_leaves_is_found(root: Path, name: str) -> None:
    put(root, name)
    assert leftovers(root) == [name]


@pytest.mark.parametrize("name", ["one/tests", "one/two/test", "one/conftest.py"])
def test_a_packages_tests_are_found(root: Path, name: str) -> None:
    put(root, f"{PACKAGES}/{name}")
    assert packaged_tests(root) == [f"{PACKAGES}/{name}"]


@pytest.mark.parametrize(("constraints", "found"), [("one==2.0\n", "one 1.0, not 2.0"), ("", "one 1.0, not None")])
def test_a_distribution_at_another_version_is_found(root: Path, constraints: str, found: str) -> None:
    assert unpinned(root, constraints) == [found]


def test_a_local_build_and_another_spelling_are_the_same_version(root: Path) -> None:
    put(root, f"{PACKAGES}/my_torch-2.0+cpu.dist-info/METADATA")
    assert unpinned(root, "one==1.0\nMy-Torch==2.0\n") == []


def test_a_module_without_bytecode_is_found(root: Path) -> None:
    put(root, f"{PACKAGES}/one/two.py")
    assert not_compiled(root) == [f"{PACKAGES}/one/two.py"]


def test_a_module_for_a_newer_python_need_not_be_compiled(root: Path) -> None:
    put(root, f"{PACKAGES}/one/two.py", "def first[T](items: list[T]) -> T: ...\n")
    assert not_compiled(root) == []


@pytest.mark.parametrize("mode", [PycInvalidationMode.TIMESTAMP, PycInvalidationMode.CHECKED_HASH])
def test_bytecode_that_is_compared_with_its_source_is_found(root: Path, mode: PycInvalidationMode) -> None:
    compiled(root, mode)
    assert not_compiled(root) == [f"{PACKAGES}/one/__init__.py"]


def test_sizes_are_of_files_and_their_sums(root: Path) -> None:
    put(root, "etc/os-release", "x" * 10)
    found = sizes(root)
    assert found["one"] > len("ONE = 1\n")
    assert found["whole"] == found["added"] + 10 == found["one"] + 10


@reads_proc
def test_a_process_is_found_by_its_root() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert process.pid in processes_in(Path("/"))
        process.communicate(b"\n")
    assert process.pid not in processes_in(Path("/"))


@reads_proc
def test_a_mount_is_found_by_the_folder_it_is_in() -> None:
    assert "/proc" in mounts_below(Path("/proc"))
    assert mounts_below(Path("/nowhere")) == []
