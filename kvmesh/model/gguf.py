"""GGUF → the Hugging Face layout: one file in, a directory that `ModelFiles` opens out.

Called by `kvmesh.model.source`, once for a file. Weights are dequantised to fp32 exactly as the format defines them and
given back the order of rows that llama.cpp's converter changed. Knows neither torch nor where converted models are kept.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, ReaderTensor
from gguf.quants import dequantize
from safetensors.numpy import save_file

from kvmesh.errors import BadConfig
from kvmesh.model.gguf_config import ROPE_FREQS, read_config
from kvmesh.model.gguf_tokenizer import GgufTokenizer, read_tokenizer

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
"""llama.cpp calls Llama, Mistral and SmolLM2 all "llama"."""

_PERMUTED = ("llama", "mistral")
"""Architectures whose q and k rows llama.cpp stores in its own rotary order."""
SHARD_BYTES = 2 << 30
"""Weights are written in files of about this size, so that a large model never lies in memory whole."""

_WHOLE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GgufFile:
    """An opened GGUF: its facts by name and its tensors."""

    def __init__(self, path: Path) -> None:
        """Raises:
        BadConfig: the file is missing, truncated, not a GGUF, or of an architecture that is not supported.
        """
        self.path = path
        if not path.is_file():
            raise BadConfig(f"{path} is missing")
        try:
            reader = GGUFReader(path)
        # The reader indexes a map of the file without checks, so damage shows as any of these.
        except (ValueError, IndexError, KeyError, TypeError, OverflowError, OSError) as error:
            raise BadConfig(f"{path} is truncated or not a GGUF file: {_line(error)}") from None
        self._fields = reader.fields
        self.tensors: dict[str, ReaderTensor] = {tensor.name: tensor for tensor in reader.tensors}
        self.architecture = str(self.fact("general.architecture", str))
        if self.architecture not in ARCHITECTURES:
            raise BadConfig(
                f"{path}: architecture {self.architecture!r} is not supported; supported: {', '.join(ARCHITECTURES)}"
            )

    def fact(self, key: str, kind: type, default: object = ...) -> Any:
        """One value of the header.

        Args:
            key: its full name.
            kind: what it must be.
            default: given when it is absent; without one it must be there.

        Raises:
            BadConfig: it is absent or of another kind.
        """
        field = self._fields.get(key)
        if field is None:
            if default is ...:
                raise BadConfig(f"{self.path}: {key} is missing")
            return default
        try:
            value = field.contents()
        except (ValueError, IndexError) as error:
            raise BadConfig(f"{self.path}: {key} is malformed: {_line(error)}") from None
        if type(value) is not kind:
            raise BadConfig(f"{self.path}: {key} is of type {type(value).__name__}, {kind.__name__} is meant")
        return value

    def values(self, name: str) -> npt.NDArray[np.float32]:
        """A tensor, dequantised, in the order the file has it.

        Raises:
            BadConfig: its format is not supported.
        """
        tensor = self.tensors[name]
        try:
            return np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        except (NotImplementedError, ValueError) as error:
            raise BadConfig(f"{self.path}: {name} can't be dequantised: {_line(error)}") from None


def convert(path: Path, directory: Path, shard_bytes: int = SHARD_BYTES) -> None:
    """Write config.json, *.safetensors, tokenizer.json, tokenizer_config.json and generation_config.json.

    Args:
        path: the GGUF file.
        directory: exists and is empty.
        shard_bytes: most bytes of weights in one file; a tensor is never cut.

    Raises:
        BadConfig: the file is broken, or holds something that is not supported; one line that names it.
    """
    file = GgufFile(path)
    config = read_config(file)
    tokenizer = read_tokenizer(file)
    ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": list(tokenizer.eos_ids), "pad_token_id": tokenizer.pad_id}
    ids = {name: value for name, value in ids.items() if value not in (None, [])}
    _write(directory / "config.json", config | ids)
    _write(directory / "generation_config.json", ids)
    _write(directory / "tokenizer_config.json", _tokenizer_config(file, tokenizer, config["max_position_embeddings"]))
    (directory / "tokenizer.json").write_text(tokenizer.tokenizer_json, encoding="utf-8")
    _write_weights(file, config, directory, shard_bytes)


def _tokenizer_config(file: GgufFile, tokenizer: GgufTokenizer, max_tokens: int) -> dict[str, Any]:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_tokens,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": tokenizer.add_bos,
    }
    template = file.fact("tokenizer.chat_template", str, "")
    return config | dict(tokenizer.special_tokens) | ({"chat_template": template} if template else {})


def hf_name(name: str) -> str | None:
    """What Hugging Face calls a tensor of a GGUF; None for a name without a place."""
    stem, _, kind = name.rpartition(".")
    if kind not in ("weight", "bias"):
        return None
    if stem in _WHOLE:
        return f"{_WHOLE[stem]}.{kind}"
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if layer is None or layer[2] not in _IN_LAYER:
        return None
    return f"model.layers.{layer[1]}.{_IN_LAYER[layer[2]]}.{kind}"


def _write_weights(file: GgufFile, config: Mapping[str, Any], directory: Path, shard_bytes: int) -> None:
    """All tensors as fp32, in one file or several with an index."""
    shards = list(_shards(file, shard_bytes))
    files = ["model.safetensors"]
    if len(shards) > 1:
        files = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    weight_map: dict[str, str] = {}
    for shard, shard_file in zip(shards, files, strict=True):
        weights = {name: _weights(file, config, stored) for name, stored in shard.items()}
        save_file(weights, directory / shard_file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(weights, shard_file)
    if len(shards) > 1:
        _write(directory / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


def _shards(file: GgufFile, shard_bytes: int) -> Iterator[dict[str, str]]:
    """New tensor names → those in the file, cut where one output file is full."""
    shard: dict[str, str] = {}
    size = 0
    for tensor in file.tensors.values():
        if tensor.name == ROPE_FREQS:
            continue
        name = hf_name(tensor.name)
        if name is None:
            raise BadConfig(f"{file.path}: tensor {tensor.name} has no place in a {file.architecture} model")
        if shard and size + 4 * tensor.n_elements > shard_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor.name
        size += 4 * tensor.n_elements
    yield shard


def _weights(file: GgufFile, config: Mapping[str, Any], stored: str) -> npt.NDArray[np.float32]:
    """One tensor as Hugging Face would have stored it, fp32."""
    values = file.values(stored)
    part = stored.split(".")[-2]
    if file.architecture in _PERMUTED and part in ("attn_q", "attn_k"):
        heads = config["num_attention_heads" if part == "attn_q" else "num_key_value_heads"]
        if values.shape[0] % (2 * heads):
            raise BadConfig(f"{file.path}: {stored} has {values.shape[0]} rows, which {heads} heads can't share")
        values = unpermute(values, heads)
    return np.ascontiguousarray(values)


def unpermute(values: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Rows of q or k, [heads * D, …]: llama.cpp puts rows i and i + D/2 of a head side by side; this takes it back."""
    pairs = values.reshape(heads, values.shape[0] // heads // 2, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def _write(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=2), encoding="utf-8")


def _line(error: BaseException) -> str:
    """An error's message on one line, short."""
    return " ".join(str(error).split())[:200]
