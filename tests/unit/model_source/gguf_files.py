"""Small GGUF files, made here, so that what must come out of them is known. Used by the tests of conversion."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog, doesn't it? It's 12,345 times 67 890.",
    "def f(x):\n    return x + 1\n\n\nclass A:\n\tpass  # tabs and   spaces",
    "Grüße aus Köln; naïve café — 東京都で日本語を話す。 Привет, мир! 😀😃 👨‍👩‍👧",
    "THE THEN THERE'S they'll we've I'm he'd   end of   text\r\n\r\nnew line",
] * 3
"""What the little vocabularies are trained on: tests use other strings too."""

LAYERS, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER = 2, 4, 2, 16, 64, 96
CONTROL, USER_DEFINED, BYTE, UNKNOWN, NORMAL = 3, 4, 6, 2, 1

Array = npt.NDArray[np.float32]


@dataclass
class Vocabulary:
    """What a GGUF says of its tokenizer."""

    facts: dict[str, Any]

    @property
    def size(self) -> int:
        return len(self.facts["tokens"])

    def without(self, name: str) -> "Vocabulary":
        return Vocabulary({k: v for k, v in self.facts.items() if k != name})

    def but(self, **facts: Any) -> "Vocabulary":
        return Vocabulary({**self.facts, **facts})


def byte_level(pre: str = "smollm", size: int = 400) -> Vocabulary:
    """A vocabulary of GPT-2's kind, with control tokens first and one user-defined token last."""
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size - 1, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    vocab = tokenizer.get_vocab()
    tokens = [*sorted(vocab, key=lambda token: vocab[token]), "<think>"]
    merges = [" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]
    kinds = [CONTROL] * len(specials) + [NORMAL] * (len(tokens) - len(specials) - 1) + [USER_DEFINED]
    return Vocabulary(
        {
            "model": "gpt2",
            "pre": pre,
            "tokens": tokens,
            "token_type": kinds,
            "merges": merges,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "unknown_token_id": 0,
            "padding_token_id": 2,
        }
    )


def sentencepiece() -> Vocabulary:
    """A vocabulary of Llama 2's kind: specials, bytes, characters, and pieces with falling scores."""
    pieces = ["▁t", "he", "▁the", "qu", "ic", "ick", "▁qu", "▁quick", "ow", "▁b", "▁brow", "▁▁", "12"]
    letters = sorted(set("abcdefghijklmnopqrstuvwxyz.,!?0123456789▁ü"))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *pieces, *letters]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * (len(pieces) + len(letters))]
    scores = [0.0] * 259 + [-float(i) for i in range(len(pieces) + len(letters))]
    return Vocabulary(
        {
            "model": "llama",
            "pre": "default",
            "tokens": tokens,
            "token_type": kinds,
            "scores": scores,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "unknown_token_id": 0,
        }
    )


@dataclass
class Made:
    """A GGUF to be written, as a model of Hugging Face's layout."""

    architecture: str = "llama"
    vocabulary: Vocabulary = field(default_factory=byte_level)
    facts: dict[str, Any] = field(default_factory=dict)
    """Under the architecture's name, over the usual ones; None leaves one out."""
    extra: dict[str, Array] = field(default_factory=dict)
    """Tensors by their GGUF names."""
    template: str | None = None
    tie: bool = True
    quantization: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32
    seed: int = 0
    head_dim: int = HEAD_DIM

    def weights(self) -> dict[str, Array]:
        """Random weights by Hugging Face's names."""
        rng = np.random.default_rng(self.seed)
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocabulary.size, HIDDEN),
            "model.norm.weight": (HIDDEN,),
        }
        if not self.tie:
            shapes["lm_head.weight"] = (self.vocabulary.size, HIDDEN)
        for layer in range(LAYERS):
            shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in self._layer().items()}
        return {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}

    def _layer(self) -> dict[str, tuple[int, ...]]:
        q, kv = HEADS * self.head_dim, KV_HEADS * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (HIDDEN,),
            "post_attention_layernorm.weight": (HIDDEN,),
            "self_attn.q_proj.weight": (q, HIDDEN),
            "self_attn.k_proj.weight": (kv, HIDDEN),
            "self_attn.v_proj.weight": (kv, HIDDEN),
            "self_attn.o_proj.weight": (HIDDEN, q),
            "mlp.gate_proj.weight": (INNER, HIDDEN),
            "mlp.up_proj.weight": (INNER, HIDDEN),
            "mlp.down_proj.weight": (HIDDEN, INNER),
        }
        if self.architecture == "qwen2":
            shapes |= {f"self_attn.{n}_proj.bias": (size,) for n, size in (("q", q), ("k", kv), ("v", kv))}
        if self.architecture == "qwen3":
            shapes |= {"self_attn.q_norm.weight": (self.head_dim,), "self_attn.k_norm.weight": (self.head_dim,)}
        return shapes

    def write(self, path: Path) -> Path:
        """Writes the file."""
        writer = gguf.GGUFWriter(path, self.architecture)
        self._write_facts(writer)
        for name, value in self.vocabulary.facts.items():
            _add(writer, f"tokenizer.ggml.{name}", value)
        if self.template is not None:
            writer.add_string("tokenizer.chat_template", self.template)
        for name, values in self.weights().items():
            stored = gguf_name(name)
            self._write_tensor(writer, stored, self._permuted(stored, values))
        for name, values in self.extra.items():
            writer.add_tensor(name, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def _write_facts(self, writer: gguf.GGUFWriter) -> None:
        facts = {
            "block_count": LAYERS,
            "context_length": 512,
            "embedding_length": HIDDEN,
            "feed_forward_length": INNER,
            "attention.head_count": HEADS,
            "attention.head_count_kv": KV_HEADS,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "attention.key_length": self.head_dim,
            "rope.freq_base": 10000.0,
            **self.facts,
        }
        for name, value in facts.items():
            if value is not None:
                _add(writer, f"{self.architecture}.{name}", value)

    def _write_tensor(self, writer: gguf.GGUFWriter, name: str, values: Array) -> None:
        if values.ndim == 1 or self.quantization == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(name, values)
        else:
            quantized = gguf.quants.quantize(values, self.quantization)
            writer.add_tensor(name, quantized, raw_dtype=self.quantization)

    def _permuted(self, name: str, values: Array) -> Array:
        """As llama.cpp's converter does it: rows i and i + D/2 of a head become neighbours."""
        part = name.split(".")[-2]
        if self.architecture != "llama" or part not in ("attn_q", "attn_k"):
            return values
        heads = HEADS if part == "attn_q" else KV_HEADS
        halves = values.reshape(heads, 2, self.head_dim // 2, *values.shape[1:])
        return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))


_GGUF_NAMES: Mapping[str, str] = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{_GGUF_NAMES[part]}.{kind}"
    return f"{_GGUF_NAMES[stem]}.{kind}"


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, Sequence):
        writer.add_array(key, value)
    else:
        raise TypeError(f"{key} is a {type(value).__name__}")
