"""A tiny random Llama with a byte tokenizer and a chat template, as a Hugging Face directory. Used by fixtures and benches."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

END_OF_TEXT = "<|end|>"
TINY_VOCAB = 257
"""256 bytes and the end of text: every other token is text."""
TINY_LAYERS = 6
TINY_POSITIONS = 512
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write_tiny_model(directory: Path, *, seed: int = 0, tie: bool = True) -> Path:
    """Writes the model and returns its directory. Ids 0 to 255 are bytes, 256 is the end of text."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=TINY_VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=TINY_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=TINY_POSITIONS,
        tie_word_embeddings=tie,
        bos_token_id=None,
        eos_token_id=256,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    _tokenizer().save(str(directory / "tokenizer.json"))
    settings = {"chat_template": TEMPLATE, "eos_token": END_OF_TEXT, "add_bos_token": False}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def _tokenizer() -> Tokenizer:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(sorted(alphabet))}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer
