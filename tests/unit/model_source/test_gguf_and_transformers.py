"""Weights and configuration equal those that transformers loads from the same GGUF, bit for bit."""

import json
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvmesh.model.files import ModelFiles
from kvmesh.model.gguf import convert
from kvmesh.model.source import packaged
from tests.unit.model_source.gguf_files import Made
from tests.unit.model_source.smollm2 import smollm2_files

# What transformers itself does on the way.
pytestmark = pytest.mark.filterwarnings("ignore")


def loaded(path: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)


def assert_same(files: ModelFiles, reference: PreTrainedModel) -> None:
    weights = {name: tensor for path in set(files.weights.values()) for name, tensor in load_file(path).items()}
    state = reference.state_dict()
    missing = state.keys() - weights.keys()
    assert missing == ({"lm_head.weight"} if files.config.tie_embeddings else set())
    different = [n for n, w in weights.items() if not torch.equal(w.view(torch.int32), state[n].view(torch.int32))]
    assert different == []
    ours, theirs = json.loads((files.directory / "config.json").read_text()), reference.config.to_dict()
    theirs = {"architectures": [type(reference).__name__], **{k: v for k, v in theirs.items() if v is not None}}
    ours["eos_token_id"] = ours["eos_token_id"][0]
    shared = ours.keys() & theirs.keys()
    assert len(shared) >= 16
    assert {name: theirs[name] for name in shared} == {name: ours[name] for name in shared}


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("quantization", ["F32", "Q4_1", "Q8_0"])
def test_a_little_model_is_the_same(architecture: str, quantization: str, tmp_path: Path) -> None:
    made = Made(
        architecture,
        tie=quantization == "F32",
        quantization=gguf.GGMLQuantizationType[quantization],
        head_dim=128 if architecture == "qwen3" else 16,  # transformers takes 128 for every Qwen3
    )
    path = made.write(tmp_path / "model.gguf")
    directory = tmp_path / "converted"
    directory.mkdir()
    convert(path, directory)
    assert_same(ModelFiles.open(directory), loaded(path))


@pytest.mark.deep
@pytest.mark.slice
@pytest.mark.timeout(300)
def test_every_weight_of_smollm2_is_the_same() -> None:
    assert_same(smollm2_files(), loaded(packaged("smollm2")))
