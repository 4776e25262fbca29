"""A tiny random Llama with a byte tokenizer, as a Hugging Face directory: steps so short that recording weighs the most."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

NAME = "tiny"
_NUM_BYTES = 256
_HIDDEN, _INNER, _LAYERS, _HEADS, _KV_HEADS, _POSITIONS = 64, 128, 2, 4, 2, 4096
_SCALE = 0.02
"""Of the weights, as such models are begun with."""


def write(directory: Path) -> Path:
    """Writes the model, the same each time; returns its directory."""
    directory.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": _NUM_BYTES,
        "hidden_size": _HIDDEN,
        "intermediate_size": _INNER,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "max_position_embeddings": _POSITIONS,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "eos_token_id": 0,
    }
    (directory / "config.json").write_text(json.dumps(config))
    save_file(_weights(), directory / "model.safetensors")
    _tokenizer().save(str(directory / "tokenizer.json"))
    return directory


def _weights() -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
    """Tensors by their names: matrices at random, norms of ones."""
    kv = _HIDDEN // _HEADS * _KV_HEADS
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (_NUM_BYTES, _HIDDEN), "model.norm": (_HIDDEN,)}
    for layer in range(_LAYERS):
        within = {
            "self_attn.q_proj": (_HIDDEN, _HIDDEN),
            "self_attn.k_proj": (kv, _HIDDEN),
            "self_attn.v_proj": (kv, _HIDDEN),
            "self_attn.o_proj": (_HIDDEN, _HIDDEN),
            "mlp.gate_proj": (_INNER, _HIDDEN),
            "mlp.up_proj": (_INNER, _HIDDEN),
            "mlp.down_proj": (_HIDDEN, _INNER),
            "input_layernorm": (_HIDDEN,),
            "post_attention_layernorm": (_HIDDEN,),
        }
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in within.items()}
    draw = np.random.default_rng(0)
    return {
        f"{name}.weight": (draw.normal(0, _SCALE, shape) if len(shape) > 1 else np.ones(shape)).astype(np.float32)
        for name, shape in shapes.items()
    }


def _tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
