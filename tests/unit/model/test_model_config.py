"""config.json: read right, or refused by the name of the field."""

from typing import Any

import pytest

from kvmesh.errors import BadConfig
from kvmesh.model.config import LinearRope, Llama3Rope, ModelConfig

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}


def read(**differs: Any) -> ModelConfig:
    """The configuration with some fields replaced, or taken away by None."""
    return ModelConfig.from_dict({k: v for k, v in {**LLAMA, **differs}.items() if v is not None})


def test_what_is_absent_has_the_default_of_the_family() -> None:
    config = read(num_key_value_heads=None)
    assert (config.num_kv_heads, config.head_dim, config.rope_theta) == (4, 16, 10000.0)
    assert not (config.tie_embeddings or config.qkv_bias or config.o_bias or config.mlp_bias or config.qk_norm)


def test_biases_and_norms_follow_the_model_type() -> None:
    def traits(**differs: Any) -> tuple[bool, ...]:
        config = read(**differs)
        return config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm

    assert traits(attention_bias=True, mlp_bias=True) == (True, True, True, False)
    assert traits(model_type="mistral", attention_bias=True, mlp_bias=True) == (False, False, False, False)
    assert traits(model_type="qwen2") == (True, False, False, False)
    assert traits(model_type="qwen3") == (False, False, False, True)
    assert traits(model_type="qwen3", attention_bias=True) == (True, True, False, True)


def test_a_head_dim_of_its_own_is_kept() -> None:
    config = read(head_dim=32)
    assert (config.q_size, config.kv_size) == (128, 64)


def test_rope_is_read_from_its_new_and_its_old_place() -> None:
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    llama3["original_max_position_embeddings"] = 128
    scaling = Llama3Rope(8.0, 1.0, 4.0, 128)
    new = read(rope_parameters={**llama3, "rope_theta": 5e5})
    old = read(rope_theta=5e5, rope_scaling=llama3)
    assert new == old
    assert (new.rope_theta, new.rope_scaling) == (5e5, scaling)
    assert read(rope_scaling={"type": "linear", "factor": 2}).rope_scaling == LinearRope(2.0)


@pytest.mark.parametrize(
    ("differs", "said"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported; supported: llama, mistral, qwen2, qwen3"),
        ({"model_type": None}, "model_type None"),
        ({"hidden_size": None}, "hidden_size must be a whole number above 0, not None"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers must be a whole number above 0, not '2'"),
        ({"vocab_size": True}, "vocab_size must"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps must be a number above 0, not -1.0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported: silu"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is set"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2}},
            "rope_type 'yarn' is not supported; supported: default, linear",
        ),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor must be a number above 0"),
        ({"rope_parameters": [1]}, "rope_parameters is not an object"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is not supported"),
        ({"model_type": "mistral", "sliding_window": 128}, "sliding_window 128 is shorter"),
        ({"model_type": "qwen2", "sliding_window": 128, "use_sliding_window": True}, "sliding_window 128"),
        ({"model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention"]}, "sliding windows are not"),
    ],
)
def test_what_is_not_computed_exactly_is_refused_by_name(differs: dict[str, Any], said: str) -> None:
    """F-M7"""
    with pytest.raises(BadConfig) as caught:
        read(**differs)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_sliding_window_that_never_matters_is_served() -> None:
    read(model_type="mistral", sliding_window=512)
    read(model_type="qwen2", sliding_window=128, use_sliding_window=False)


def test_the_tensors_of_the_model_are_those_of_its_layers_and_ends() -> None:
    config = read()
    names = set(config.tensors())
    assert set(config.layer_tensors(0)) | set(config.layer_tensors(1)) < names
    assert {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"} < names
    assert "lm_head.weight" not in read(tie_word_embeddings=True).tensors()
