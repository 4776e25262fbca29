"""A model's directory in the Hugging Face layout: checked as a whole before anything is loaded from it.

Torch-free: the gateway opens it for tokenizer and template, stages and decoders for their tensors. Only headers and a
few sampled bytes of the weights are read, so opening costs milliseconds whatever the model's size.
"""

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from kvmesh.errors import BadConfig
from kvmesh.model.config import LM_HEAD, ModelConfig

_SAMPLES = 4
"""Places of each tensor that go into the fingerprint."""
_SAMPLE_BYTES = 256
_MAX_HEADER_BYTES = 100 << 20  # the limit of the safetensors format itself
_DTYPE_BYTES = {"F32": 4, "BF16": 2, "F16": 2}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor lies: bytes [begin, end) of `path`."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class ModelFiles:
    """A usable model directory."""

    directory: Path
    config: ModelConfig
    weights: dict[str, Path]
    """Tensor name → the safetensors file it lies in."""
    fingerprint: str
    """The same on every machine for the same configuration and weights, however they are cut into files."""
    tokenizer_path: Path
    chat_template: str | None
    eos_ids: tuple[int, ...]
    bos_id: int | None
    add_bos: bool
    """tokenizer_config.json asks for a begin-of-text token before every prompt."""
    name: str

    @classmethod
    def open(cls, directory: Path, name: str = "") -> "ModelFiles":
        """Check a directory and read what it says of its model.

        Args:
            directory: holds config.json, tokenizer.json and *.safetensors, one or several with their index.
            name: what the model is called; the directory's name when empty.

        Raises:
            BadConfig: something is missing, truncated, contradictory or not supported; one line that names the file.
        """
        if not directory.is_dir():
            raise BadConfig(f"{directory} is not a model directory")
        raw = _read_object(directory / "config.json")
        try:
            config = ModelConfig.from_dict(raw)
        except BadConfig as error:
            raise BadConfig(f"{directory / 'config.json'}: {error}") from None
        tokenizer_path = directory / "tokenizer.json"
        if not tokenizer_path.is_file():
            raise BadConfig(f"{tokenizer_path} is missing")
        tensors = _stored_tensors(directory)
        _check_tensors(config, tensors, directory)
        generation = _read_object(directory / "generation_config.json", optional=True)
        tokenizer = _read_object(directory / "tokenizer_config.json", optional=True)
        return cls(
            directory=directory,
            config=config,
            weights={tensor: stored.path for tensor, stored in tensors.items()},
            fingerprint=_fingerprint(config, tensors),
            tokenizer_path=tokenizer_path,
            chat_template=_chat_template(directory, tokenizer),
            eos_ids=_ids(generation.get("eos_token_id", raw.get("eos_token_id"))),
            bos_id=next(iter(_ids(generation.get("bos_token_id", raw.get("bos_token_id")))), None),
            add_bos=bool(tokenizer.get("add_bos_token", False)),
            name=name or directory.name,
        )


def _read_object(path: Path, *, optional: bool = False) -> dict[str, Any]:
    """The JSON object in a file; empty when the file is optional and absent."""
    if not path.is_file():
        if optional:
            return {}
        raise BadConfig(f"{path} is missing")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BadConfig(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadConfig(f"{path} is not a JSON object")
    return value


def _ids(value: object) -> tuple[int, ...]:
    """One id, several or none."""
    values = value if isinstance(value, list) else [value]
    return tuple(v for v in values if isinstance(v, int))


def _chat_template(directory: Path, tokenizer: Mapping[str, Any]) -> str | None:
    """The template of its own file or of tokenizer_config.json, where several may be named: then "default"."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = tokenizer.get("chat_template")
    if isinstance(template, list):
        template = next((t.get("template") for t in template if t.get("name") == "default"), None)
    return template if isinstance(template, str) else None


def _stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """All tensors of the directory's weight files; of the files the index names where there is one."""
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        paths = sorted(directory.glob("*.safetensors"))
        if not paths:
            raise BadConfig(f"{directory} holds no *.safetensors")
        return {name: tensor for path in paths for name, tensor in _read_header(path).items()}
    weight_map = _read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise BadConfig(f"{index} has no weight_map from tensor to file")
    tensors: dict[str, StoredTensor] = {}
    for shard in sorted(set(weight_map.values())):
        # Only the name: an index never reaches out of its directory.
        path = directory / Path(shard).name
        if not path.is_file():
            raise BadConfig(f"{index} names {shard}, which is missing")
        tensors |= _read_header(path)
    for name, shard in weight_map.items():
        if name not in tensors:
            raise BadConfig(f"{index} places {name} in {shard}, which does not hold it")
    return tensors


def _read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file.

    Raises:
        BadConfig: the file is truncated or not in this format.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\0"))
        if not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
            raise BadConfig(f"{path} is truncated or not a safetensors file")
        try:
            header = json.loads(file.read(length))
            data = 8 + length
            tensors = {
                name: StoredTensor(
                    path,
                    str(entry["dtype"]),
                    tuple(int(n) for n in entry["shape"]),
                    data + int(entry["data_offsets"][0]),
                    data + int(entry["data_offsets"][1]),
                )
                for name, entry in header.items()
                if name != "__metadata__"
            }
        except (ValueError, KeyError, TypeError, IndexError, AttributeError):
            raise BadConfig(f"{path} has a malformed safetensors header") from None
    end = max((tensor.end for tensor in tensors.values()), default=data)
    if end != size:
        raise BadConfig(f"{path} is truncated: it has {size} bytes, its header speaks of {end}")
    return tensors


def _check_tensors(config: ModelConfig, tensors: Mapping[str, StoredTensor], directory: Path) -> None:
    """Raises BadConfig unless the files hold exactly the tensors this architecture computes with."""
    expected = config.tensors()
    for name, shape in expected.items():
        tensor = tensors.get(name)
        if tensor is None:
            raise BadConfig(f"{directory} has no tensor {name}")
        if tensor.shape != shape:
            raise BadConfig(f"{tensor.path}: {name} has shape {list(tensor.shape)}, config.json means {list(shape)}")
        if tensor.dtype not in _DTYPE_BYTES:
            raise BadConfig(f"{tensor.path}: {name} is {tensor.dtype}; supported: {', '.join(_DTYPE_BYTES)}")
    for name, tensor in tensors.items():
        # Old checkpoints store the rotary frequencies, tied ones sometimes the head: both say nothing new.
        if name not in expected and not name.endswith("rotary_emb.inv_freq") and name != LM_HEAD:
            raise BadConfig(f"{tensor.path}: {name} has no place in a {config.model_type} of this config.json")


def _fingerprint(config: ModelConfig, tensors: Mapping[str, StoredTensor]) -> str:
    """Hash over the configuration and, of each tensor it names, name, dtype, shape and some bytes from fixed places."""
    digest = hashlib.sha256(json.dumps(asdict(config), sort_keys=True).encode())
    files: dict[Path, BinaryIO] = {}
    try:
        for name in sorted(config.tensors()):
            tensor = tensors[name]
            if tensor.path not in files:
                files[tensor.path] = tensor.path.open("rb", buffering=0)
            digest.update(f"{name} {tensor.dtype} {tensor.shape}".encode())
            room = max(0, tensor.end - tensor.begin - _SAMPLE_BYTES)
            for sample in range(_SAMPLES):
                files[tensor.path].seek(tensor.begin + room * sample // (_SAMPLES - 1))
                digest.update(files[tensor.path].read(min(_SAMPLE_BYTES, tensor.end - tensor.begin)))
    finally:
        for file in files.values():
            file.close()
    return digest.hexdigest()
