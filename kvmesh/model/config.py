"""What kind of decoder-only transformer a config.json describes, and which tensors it must bring.

Torch-free: gateway and loader read it. Everything that this project's modules do not compute exactly is refused here, by
the name of the field, so that a model is either right or not served.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from kvmesh.errors import BadConfig

ModelType = Literal["llama", "mistral", "qwen2", "qwen3"]
SUPPORTED_MODEL_TYPES: tuple[ModelType, ...] = ("llama", "mistral", "qwen2", "qwen3")

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Llama3Rope:
    """Llama 3's stretched rotary frequencies; lengths are in tokens."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class LinearRope:
    """Positions divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of one model; all that its computation depends on beside the weights."""

    model_type: ModelType
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Llama3Rope | LinearRope | None
    max_positions: int
    tie_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "ModelConfig":
        """Read a Hugging Face config.json.

        Raises:
            BadConfig: a field is missing or malformed, or asks for what is not supported; names the field.
        """
        model_type = raw.get("model_type")
        if model_type not in SUPPORTED_MODEL_TYPES:
            raise BadConfig(
                f"model_type {model_type!r} is not supported; supported: {', '.join(SUPPORTED_MODEL_TYPES)}"
            )
        _refuse_unsupported(raw)
        num_heads = _count(raw, "num_attention_heads")
        attention_bias = bool(raw.get("attention_bias", False)) and model_type in ("llama", "qwen3")
        theta, scaling = _rope(raw)
        config = cls(
            model_type=cast(ModelType, model_type),
            vocab_size=_count(raw, "vocab_size"),
            hidden_size=_count(raw, "hidden_size"),
            intermediate_size=_count(raw, "intermediate_size"),
            num_layers=_count(raw, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=_count(raw, "num_key_value_heads", num_heads),
            head_dim=_count(raw, "head_dim", _count(raw, "hidden_size") // num_heads),
            rms_norm_eps=_number(raw, "rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            max_positions=_count(raw, "max_position_embeddings"),
            tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=attention_bias or model_type == "qwen2",
            o_bias=attention_bias,
            mlp_bias=bool(raw.get("mlp_bias", False)) and model_type == "llama",
            qk_norm=model_type == "qwen3",
        )
        config._check_shape()
        return config

    def _check_shape(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise BadConfig(
                f"num_attention_heads {self.num_heads} is not a multiple of num_key_value_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise BadConfig(f"head_dim {self.head_dim} is odd; rotary embedding needs an even one")

    @property
    def q_size(self) -> int:
        """Width of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all KV heads, K or V."""
        return self.num_kv_heads * self.head_dim

    def layer_tensors(self, layer: int) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the tensors of one layer."""
        hidden, inner = self.hidden_size, self.intermediate_size
        shapes: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (self.q_size, hidden),
            "self_attn.k_proj.weight": (self.kv_size, hidden),
            "self_attn.v_proj.weight": (self.kv_size, hidden),
            "self_attn.o_proj.weight": (hidden, self.q_size),
            "mlp.gate_proj.weight": (inner, hidden),
            "mlp.up_proj.weight": (inner, hidden),
            "mlp.down_proj.weight": (hidden, inner),
        }
        if self.qkv_bias:
            sizes = {"q": self.q_size, "k": self.kv_size, "v": self.kv_size}
            shapes |= {f"self_attn.{name}_proj.bias": (size,) for name, size in sizes.items()}
        if self.o_bias:
            shapes["self_attn.o_proj.bias"] = (hidden,)
        if self.mlp_bias:
            shapes |= {"mlp.gate_proj.bias": (inner,), "mlp.up_proj.bias": (inner,), "mlp.down_proj.bias": (hidden,)}
        if self.qk_norm:
            shapes |= {"self_attn.q_norm.weight": (self.head_dim,), "self_attn.k_norm.weight": (self.head_dim,)}
        return {f"model.layers.{layer}.{name}": shape for name, shape in shapes.items()}

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of all tensors of the model."""
        table = (self.vocab_size, self.hidden_size)
        shapes: dict[str, tuple[int, ...]] = {EMBEDDING: table, FINAL_NORM: (self.hidden_size,)}
        if not self.tie_embeddings:
            shapes[LM_HEAD] = table
        for layer in range(self.num_layers):
            shapes |= self.layer_tensors(layer)
        return shapes


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    """Raises BadConfig for a field that would change the computation in a way not implemented."""
    if raw.get("quantization_config"):
        raise BadConfig("quantization_config is set: quantised weights are not supported; supported: fp32, bf16, fp16")
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise BadConfig(f"hidden_act {raw['hidden_act']!r} is not supported; supported: silu")
    window = raw.get("sliding_window")
    windowed = raw.get("use_sliding_window", raw.get("model_type") == "mistral")
    layer_types = set(raw.get("layer_types") or ())
    if (window and windowed and window < _count(raw, "max_position_embeddings")) or layer_types - {"full_attention"}:
        raise BadConfig(
            f"sliding_window {window} is shorter than max_position_embeddings: sliding windows are not supported;"
            " supported: full attention (lower max_position_embeddings to the window to serve within it)"
        )


def _rope(raw: Mapping[str, Any]) -> tuple[float, Llama3Rope | LinearRope | None]:
    """Base and scaling of the rotary embedding, from `rope_parameters` or the older `rope_theta` and `rope_scaling`."""
    fields = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(fields, Mapping):
        raise BadConfig("rope_parameters is not an object")
    theta = _number(fields, "rope_theta", _number(raw, "rope_theta", 10000.0))
    if _number(fields, "partial_rotary_factor", _number(raw, "partial_rotary_factor", 1.0)) != 1.0:
        raise BadConfig("partial_rotary_factor is not supported; supported: 1.0")
    kind = fields.get("rope_type", fields.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, LinearRope(factor=_number(fields, "factor"))
    if kind == "llama3":
        return theta, Llama3Rope(
            factor=_number(fields, "factor"),
            low_freq_factor=_number(fields, "low_freq_factor"),
            high_freq_factor=_number(fields, "high_freq_factor"),
            original_max_positions=_count(fields, "original_max_position_embeddings"),
        )
    raise BadConfig(f"rope_type {kind!r} is not supported; supported: default, linear, llama3")


def _count(raw: Mapping[str, Any], field: str, default: int | None = None) -> int:
    """A whole number above 0; `default` when absent or null."""
    value = raw.get(field)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise BadConfig(f"{field} must be a whole number above 0, not {value!r}")
    return value


def _number(raw: Mapping[str, Any], field: str, default: float | None = None) -> float:
    """A finite number above 0; `default` when absent or null."""
    value = raw.get(field)
    if value is None:
        value = default
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not (value > 0 and math.isfinite(value)):
        raise BadConfig(f"{field} must be a number above 0, not {value!r}")
    return float(value)
