"""A model is found by what a person names, and a GGUF is converted once, whole, whoever else starts at that moment."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvmesh.errors import BadConfig
from kvmesh.model.source import is_converted, packaged, resolve
from tests.unit.model_source.gguf_files import Made

ROOT = Path(__file__).parents[3]


@pytest.fixture
def gguf_path(tmp_path: Path) -> Path:
    return Made().write(tmp_path / "little.gguf")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def conversions(cache: Path) -> list[Path]:
    return [path for path in (cache / "gguf").iterdir() if path.is_dir()]


def test_a_gguf_is_named_by_its_file_and_lies_under_its_hash(gguf_path: Path, cache: Path) -> None:
    files = resolve(str(gguf_path), cache)
    assert files.name == "little"
    assert re.fullmatch(r"[0-9a-f]{64}\.\d+", files.directory.name)
    assert conversions(cache) == [files.directory]


def test_it_is_converted_once(gguf_path: Path, cache: Path) -> None:
    assert not is_converted(str(gguf_path), cache)
    first = resolve(str(gguf_path), cache)
    born = first.directory.stat().st_ino
    assert is_converted(str(gguf_path), cache)
    assert resolve(str(gguf_path), cache) == first
    assert first.directory.stat().st_ino == born


def test_starting_again_does_not_read_the_file(gguf_path: Path, cache: Path) -> None:
    first = resolve(str(gguf_path), cache)
    before = gguf_path.stat()
    gguf_path.write_bytes(bytes(before.st_size))
    os.utime(gguf_path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert resolve(str(gguf_path), cache) == first


def test_another_content_at_the_same_path_is_another_model(gguf_path: Path, cache: Path) -> None:
    first = resolve(str(gguf_path), cache)
    Made(seed=1).write(gguf_path)
    second = resolve(str(gguf_path), cache)
    assert second.fingerprint != first.fingerprint
    assert len(conversions(cache)) == 2


def test_the_same_content_at_another_path_is_not_converted_again(gguf_path: Path, cache: Path) -> None:
    first = resolve(str(gguf_path), cache)
    copy = shutil.copy(gguf_path, gguf_path.with_name("other.gguf"))
    second = resolve(str(copy), cache)
    assert (second.directory, second.name) == (first.directory, "other")
    assert len(conversions(cache)) == 1


def test_the_fingerprint_does_not_depend_on_the_cache(gguf_path: Path, tmp_path: Path) -> None:
    one, two = (resolve(str(gguf_path), tmp_path / name) for name in ("one", "two"))
    assert one.fingerprint == two.fingerprint


def test_processes_that_start_together_convert_once(gguf_path: Path, cache: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from kvmesh.model.source import resolve;"
        "print(resolve(sys.argv[1], Path(sys.argv[2])).directory.stat().st_ino)"
    )
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(gguf_path), str(cache)], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    seen = {racer.communicate(timeout=50)[0] for racer in racers}
    assert [racer.returncode for racer in racers] == [0] * 4
    assert len(seen) == 1
    assert len(conversions(cache)) == 1


def test_what_a_killed_conversion_left_is_cleared_away(gguf_path: Path, cache: Path) -> None:
    files = resolve(str(gguf_path), cache)
    leftover = files.directory.with_name(f"{files.directory.name}.newabc")
    files.directory.rename(leftover)
    (leftover / "model.safetensors").write_bytes(b"half")
    assert resolve(str(gguf_path), cache).directory == files.directory
    assert conversions(cache) == [files.directory]


def test_a_broken_file_leaves_nothing_and_is_named(gguf_path: Path, cache: Path) -> None:
    gguf_path.write_bytes(gguf_path.read_bytes()[:-100])
    with pytest.raises(BadConfig, match=r"^\S*little\.gguf is truncated or not a GGUF file.*$"):
        resolve(str(gguf_path), cache)
    assert conversions(cache) == []


def test_a_conversion_that_can_not_be_used_is_told_by_the_given_name(cache: Path, tmp_path: Path) -> None:
    path = Made(facts={"block_count": 3}).write(tmp_path / "three.gguf")
    with pytest.raises(BadConfig, match=r"^\S*three\.gguf has no tensor model\.layers\.2"):
        resolve(str(path), cache)
    assert conversions(cache) == []


def test_a_converted_model_opens_from_a_cache_that_is_only_read(gguf_path: Path, cache: Path) -> None:
    files = resolve(str(gguf_path), cache)
    for path in (cache / "gguf").glob("*.json"):
        path.unlink()
        path.mkdir()  # the note of the hash can neither be read nor written
    assert resolve(str(gguf_path), cache) == files


def test_a_directory_is_opened_as_it_is(gguf_path: Path, cache: Path) -> None:
    directory = resolve(str(gguf_path), cache).directory
    assert resolve(str(directory), cache).directory == directory
    assert is_converted(str(directory), cache)


@pytest.mark.parametrize("model", ["smollm3", "/no/such/directory", ""])
def test_what_is_no_model_is_refused_with_what_would_be(model: str, cache: Path) -> None:
    with pytest.raises(BadConfig, match=r"neither a \*\.gguf file nor a directory, nor one of: smollm2"):
        resolve(model, cache)


def test_a_missing_gguf_is_named(cache: Path) -> None:
    with pytest.raises(BadConfig, match=r"absent\.gguf can't be read: No such file"):
        resolve("absent.gguf", cache)


def test_a_cache_that_can_not_be_written_is_named(gguf_path: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(BadConfig, match=r"can't be converted in .*file/gguf: Not a directory"):
        resolve(str(gguf_path), tmp_path / "file")


def test_smollm2_is_the_file_of_its_package() -> None:
    assert packaged("smollm2").name == "SmolLM2-135M-Instruct.Q4_1.gguf"
