"""What comes out of a GGUF: the weights bit for bit, the configuration, or one clear line."""

import json
import random
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from kvmesh.errors import BadConfig
from kvmesh.model.config import Llama3Rope
from kvmesh.model.files import ModelFiles
from kvmesh.model.gguf import convert, unpermute
from tests.unit.model_source.gguf_files import HEAD_DIM, KV_HEADS, Made, byte_level, sentencepiece


def converted(made: Made, tmp_path: Path, **more: Any) -> ModelFiles:
    directory = tmp_path / "converted"
    directory.mkdir()
    convert(made.write(tmp_path / "model.gguf"), directory, **more)
    return ModelFiles.open(directory)


def refusal(made: Made, tmp_path: Path) -> str:
    with pytest.raises(BadConfig) as caught:
        converted(made, tmp_path)
    line = str(caught.value)
    assert "\n" not in line
    return line


def stored(files: ModelFiles) -> dict[str, Any]:
    return {name: tensor for path in set(files.weights.values()) for name, tensor in load_file(path).items()}


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tie", [True, False])
def test_every_weight_comes_back_bit_for_bit(architecture: str, tie: bool, tmp_path: Path) -> None:
    made = Made(architecture, tie=tie)
    files = converted(made, tmp_path)
    weights, got = made.weights(), stored(files)
    assert got.keys() == weights.keys()
    assert all(np.array_equal(got[name].view(np.int32), weights[name].view(np.int32)) for name in weights)
    assert files.config.tie_embeddings is tie


def test_the_configuration_says_what_the_header_says(tmp_path: Path) -> None:
    made = Made("qwen3", facts={"rope.freq_base": 1e6, "context_length": 777}, head_dim=40)
    config = converted(made, tmp_path).config
    assert (config.model_type, config.num_layers, config.num_kv_heads, config.head_dim) == ("qwen3", 2, KV_HEADS, 40)
    assert (config.rope_theta, config.max_positions, config.qk_norm) == (1e6, 777, True)
    assert config.rms_norm_eps == pytest.approx(1e-5)


def test_ids_template_and_begin_of_text_are_those_of_the_file(tmp_path: Path) -> None:
    vocabulary = byte_level().but(add_bos_token=True, eot_token_id=0)
    files = converted(Made(vocabulary=vocabulary, template="{{ messages }}"), tmp_path)
    assert (files.bos_id, files.eos_ids, files.add_bos) == (1, (2, 0), True)
    assert files.chat_template == "{{ messages }}"
    said = json.loads((files.directory / "tokenizer_config.json").read_text())
    assert (said["bos_token"], said["eos_token"]) == ("<|im_start|>", "<|im_end|>")


def test_a_file_without_a_template_gives_none(tmp_path: Path) -> None:
    assert converted(Made(), tmp_path).chat_template is None


def test_large_weights_are_written_in_several_files_that_hold_the_same(tmp_path: Path) -> None:
    made = Made(tie=False)
    files = converted(made, tmp_path, shard_bytes=40_000)
    assert len(set(files.weights.values())) > 2
    got = stored(files)
    assert all(np.array_equal(got[name], weight) for name, weight in made.weights().items())


def test_unpermuting_moves_the_odd_rows_of_each_head_behind_the_even_ones() -> None:
    rows = np.arange(16, dtype=np.float32)
    assert unpermute(rows, heads=2).tolist() == [0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15]


def llama3_factors(factor: float, theta: float = 10000.0) -> Any:
    """The rule as the Llama 3 authors wrote it, one frequency at a time."""
    factors = []
    for i in range(0, HEAD_DIM, 2):
        wavelength = 2 * np.pi * theta ** (i / HEAD_DIM)
        if wavelength < 8192 / 4:
            factors.append(1.0)
        elif wavelength > 8192:
            factors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, dtype=np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_rope_is_found_again_from_its_factors(factor: float, tmp_path: Path) -> None:
    config = converted(Made(extra={"rope_freqs.weight": llama3_factors(factor)}), tmp_path).config
    assert config.rope_scaling == Llama3Rope(factor, 1.0, 4.0, 8192)


def test_linear_rope_scaling_is_kept(tmp_path: Path) -> None:
    config = converted(Made(facts={"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}), tmp_path).config
    assert config.rope_scaling is not None
    assert config.rope_scaling.factor == 4.0


@pytest.mark.parametrize(
    ("made", "named"),
    [
        (Made("gemma"), "gemma"),
        (Made(facts={"expert_count": 8}), "experts"),
        (Made(facts={"rope.dimension_count": 8}), "partial_rotary_factor"),
        (Made(facts={"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}), "yarn"),
        (Made(facts={"block_count": None}), "llama.block_count is missing"),
        (Made(facts={"block_count": 3}), "model.layers.2"),
        (Made(facts={"embedding_length": 3}), "embedding_length 3"),
        (Made(facts={"attention.head_count": "four"}), "llama.attention.head_count is of type str"),
        (Made(extra={"rope_freqs.weight": np.ones(8, np.float32) * 3}), "rope_freqs.weight"),
        (Made(extra={"blk.0.attn_sinks.weight": np.ones(8, np.float32)}), "blk.0.attn_sinks.weight has no place"),
        (Made(vocabulary=byte_level().but(model="rwkv")), "'rwkv' is not supported"),
        (Made(vocabulary=byte_level("gpt-4o")), "'gpt-4o' is not supported"),
        (Made(vocabulary=byte_level().without("merges")), "tokenizer.ggml.merges is missing"),
        (Made(vocabulary=byte_level().but(merges=["a zzz"])), "do not fit"),
        (Made(vocabulary=byte_level().but(merges=["a b c"])), "do not fit"),
        (Made(vocabulary=byte_level().but(token_type=[1])), "1 token types"),
        (Made(vocabulary=byte_level().but(eos_token_id=9999)), "eos_token_id 9999 is outside the vocabulary"),
        (Made(vocabulary=sentencepiece().without("scores")), "tokenizer.ggml.scores is missing"),
        (Made(vocabulary=sentencepiece().but(scores=[0.5])), "1 scores"),
    ],
    ids=lambda value: value.replace(" ", "_") if isinstance(value, str) else "",
)
def test_what_is_not_supported_is_refused_by_name(made: Made, named: str, tmp_path: Path) -> None:
    assert named in refusal(made, tmp_path)


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match=r"absent\.gguf is missing"):
        convert(tmp_path / "absent.gguf", tmp_path)


def test_a_file_cut_anywhere_is_refused_in_one_line(tmp_path: Path) -> None:
    whole = Made().write(tmp_path / "whole.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    # Header, vocabulary, table of tensors and data: each is cut many times.
    for length in [*range(0, 64, 7), *range(64, len(whole), 9973), len(whole) - 1]:
        cut.write_bytes(whole[:length])
        with pytest.raises(BadConfig, match=r"^\S*cut\.gguf.*$"):
            convert(cut, tmp_path)


def test_a_file_with_flipped_bits_is_refused_or_converted_and_nothing_else_happens(tmp_path: Path) -> None:
    whole = Made(vocabulary=byte_level(size=300)).write(tmp_path / "whole.gguf").read_bytes()
    broken, out = tmp_path / "broken.gguf", tmp_path / "out"
    out.mkdir()
    rng = random.Random(5)
    refused = 0
    for _ in range(60):
        damaged = bytearray(whole)
        damaged[rng.randrange(9000)] ^= 1 << rng.randrange(8)
        broken.write_bytes(damaged)
        try:
            convert(broken, out)
        except BadConfig as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused > 8


def test_quantized_weights_are_what_the_format_defines(tmp_path: Path) -> None:
    made = Made(quantization=gguf.GGMLQuantizationType.Q4_1)
    got = stored(converted(made, tmp_path))
    name = "model.layers.1.mlp.down_proj.weight"
    blocks = gguf.quants.quantize(made.weights()[name], gguf.GGMLQuantizationType.Q4_1).reshape(-1, 20)
    scale, least = (blocks[:, i : i + 2].copy().view(np.float16).astype(np.float32) for i in (0, 2))
    low, high = blocks[:, 4:] & 15, blocks[:, 4:] >> 4
    meant = scale * np.concatenate([low, high], axis=1).astype(np.float32) + least
    assert np.array_equal(got[name].reshape(-1, 32), meant)
