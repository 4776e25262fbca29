"""A model directory: opened whole, or refused in one clear line."""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvmesh.errors import BadConfig
from kvmesh.model.files import ModelFiles
from kvmesh.model.runner import Runner
from tests.unit.model.tiny_models import Tiny


@pytest.fixture
def directory(tiny: Callable[[str], Tiny], tmp_path: Path) -> Path:
    """A copy, in several shards, that a test may damage."""
    return Path(shutil.copytree(tiny("qwen2").files.directory, tmp_path / "model"))


@pytest.fixture
def single(tiny: Callable[[str], Tiny], directory: Path) -> Path:
    """The same model in one file, without an index."""
    weights = all_weights(directory)
    for path in [*directory.glob("*.safetensors"), *directory.glob("*.index.json")]:
        path.unlink()
    save_file(weights, directory / "model.safetensors")
    return directory


def all_weights(directory: Path) -> dict[str, torch.Tensor]:
    return {name: t.clone() for path in directory.glob("*.safetensors") for name, t in load_file(path).items()}


def refusal(directory: Path) -> str:
    with pytest.raises(BadConfig) as caught:
        ModelFiles.open(directory)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def edit(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), **fields}))


def test_all_is_read_from_a_good_directory(directory: Path) -> None:
    edit(directory / "generation_config.json", eos_token_id=[7, 9], bos_token_id=3)
    edit(directory / "tokenizer_config.json", add_bos_token=True, chat_template="{{ messages }}")
    files = ModelFiles.open(directory)
    assert (files.eos_ids, files.bos_id, files.add_bos) == ((7, 9), 3, True)
    assert (files.chat_template, files.name) == ("{{ messages }}", "model")
    assert files.tokenizer_path == directory / "tokenizer.json"
    assert set(files.weights) == set(files.config.tensors())
    assert ModelFiles.open(directory, "qwen").name == "qwen"


def test_the_template_of_its_own_file_wins_and_the_default_of_several_is_taken(directory: Path) -> None:
    edit(
        directory / "tokenizer_config.json",
        chat_template=[{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}],
    )
    assert ModelFiles.open(directory).chat_template == "d"
    (directory / "chat_template.jinja").write_text("own")
    assert ModelFiles.open(directory).chat_template == "own"


def test_end_tokens_fall_back_to_config_json(directory: Path) -> None:
    (directory / "generation_config.json").unlink()
    edit(directory / "config.json", eos_token_id=5)
    files = ModelFiles.open(directory)
    assert (files.eos_ids, files.chat_template, files.add_bos) == ((5,), None, False)


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none") == f"{tmp_path / 'none'} is not a model directory"


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_missing_file_is_named(name: str, directory: Path) -> None:
    (directory / name).unlink()
    assert refusal(directory) == f"{directory / name} is missing"


def test_a_config_that_is_not_json_is_named(directory: Path) -> None:
    (directory / "config.json").write_text("{")
    assert f"{directory / 'config.json'} is not JSON" in refusal(directory)
    (directory / "config.json").write_text("[]")
    assert refusal(directory) == f"{directory / 'config.json'} is not a JSON object"


def test_an_architecture_not_supported_names_the_file_and_the_supported(directory: Path) -> None:
    edit(directory / "config.json", model_type="gemma3")
    assert refusal(directory).startswith(
        f"{directory / 'config.json'}: model_type 'gemma3' is not supported; supported: llama"
    )


def test_no_weights_are_said_so(single: Path) -> None:
    (single / "model.safetensors").unlink()
    assert refusal(single) == f"{single} holds no *.safetensors"


def test_an_index_naming_an_absent_shard_names_it(directory: Path) -> None:
    shard = sorted(directory.glob("*.safetensors"))[1]
    shard.unlink()
    assert refusal(directory) == f"{directory / 'model.safetensors.index.json'} names {shard.name}, which is missing"


def test_an_index_that_misplaces_a_tensor_names_it(directory: Path) -> None:
    index = directory / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    edit(index, weight_map={**weight_map, "model.layers.9.x": next(iter(weight_map.values()))})
    assert "places model.layers.9.x in" in refusal(directory)
    edit(index, weight_map=None)
    assert "has no weight_map" in refusal(directory)


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_a_truncated_file_is_said_to_be_so(keep: int, single: Path) -> None:
    path = single / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:keep])
    assert refusal(single).startswith(f"{path} is truncated")


def test_a_file_of_another_format_is_named(single: Path) -> None:
    path = single / "model.safetensors"
    path.write_bytes(b"GGUF" * 100)
    assert refusal(single) == f"{path} is truncated or not a safetensors file"
    path.write_bytes((20).to_bytes(8, "little") + b"x" * 100)
    assert refusal(single) == f"{path} has a malformed safetensors header"


def test_tensors_that_contradict_the_config_are_named(single: Path) -> None:
    weights, path = all_weights(single), single / "model.safetensors"
    norm = "model.layers.1.input_layernorm.weight"

    def refusal_of(changed: dict[str, torch.Tensor]) -> str:
        save_file(changed, path)
        return refusal(single)

    assert refusal_of({n: t for n, t in weights.items() if n != norm}) == f"{single} has no tensor {norm}"
    assert "has shape [5], config.json means [48]" in refusal_of({**weights, norm: torch.ones(5)})
    assert "is I8; supported: F32, BF16, F16" in refusal_of({**weights, norm: torch.ones(48, dtype=torch.int8)})
    extra = "model.layers.1.self_attn.o_proj.bias"
    assert f"{extra} has no place in a qwen2" in refusal_of({**weights, extra: torch.ones(48)})


def test_leftovers_that_say_nothing_new_are_ignored(single: Path) -> None:
    leftovers = {"lm_head.weight": torch.ones(101, 48), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    save_file({**all_weights(single), **leftovers}, single / "model.safetensors")
    ModelFiles.open(single)


def test_the_fingerprint_is_of_the_weights_and_not_of_how_they_are_stored(
    tiny: Callable[[str], Tiny], single: Path
) -> None:
    sharded = tiny("qwen2").files
    assert ModelFiles.open(single, "other name").fingerprint == sharded.fingerprint
    assert ModelFiles.open(single).weights != sharded.weights


def test_other_weights_or_another_configuration_have_another_fingerprint(single: Path) -> None:
    weights, first = all_weights(single), ModelFiles.open(single).fingerprint
    edit(single / "config.json", rms_norm_eps=1e-4)
    second = ModelFiles.open(single).fingerprint
    tuned = {n: t + 1e-3 if "layers.2.mlp.down" in n else t for n, t in weights.items()}
    save_file(tuned, single / "model.safetensors")
    third = ModelFiles.open(single).fingerprint
    assert len({first, second, third}) == 3


def test_a_large_model_is_opened_quickly(single: Path) -> None:
    # 300 MB of sparse file: reading all of it would take longer than the limit.
    weights = all_weights(single)
    vocab = 1_500_000
    table = "model.embed_tokens.weight"
    edit(single / "config.json", vocab_size=vocab)
    header = {}
    end = 0
    for name, tensor in weights.items():
        shape = [vocab, 48] if name == table else list(tensor.shape)
        begin, end = end, end + 4 * torch.Size(shape).numel()
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    head = json.dumps(header).encode()
    with (single / "model.safetensors").open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        file.truncate(8 + len(head) + end)
    began = time.process_time()
    ModelFiles.open(single)
    assert time.process_time() - began < 0.1


def test_opening_needs_no_torch() -> None:
    code = "import sys, kvmesh.model.files, kvmesh.kv.frames; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_weights_stored_in_another_format_are_loaded(stored: torch.dtype, single: Path) -> None:
    save_file({n: t.to(stored) for n, t in all_weights(single).items()}, single / "model.safetensors")
    files = ModelFiles.open(single)
    runner = Runner.load(files, 0, 3, dtype="fp32", device="cpu", num_pages=1, page_size=4)
    assert runner.vocab_size == 101
