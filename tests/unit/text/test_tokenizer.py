"""Prompts and rendered conversations become the ids that the model was trained on."""

from pathlib import Path

import pytest
from tokenizers import decoders

from kvmesh.errors import BadConfig
from kvmesh.text.tokenizer import Tokenizer
from tests.unit.model_source.smollm2 import smollm2_files
from tests.unit.nasty import STRINGS
from tests.unit.text.tokenizers_made import byte_inner, byte_tokenizer, sentencepiece_inner, sentencepiece_tokenizer


def test_begin_of_text_comes_before_a_prompt_and_never_before_a_rendered_conversation() -> None:
    tokenizer = byte_tokenizer(add_bos=True)
    assert tokenizer.encode("A") == [257, 0x41]
    assert tokenizer.encode_rendered("A") == [0x41]


def test_begin_of_text_is_not_added_twice() -> None:
    assert byte_tokenizer(add_bos=True).encode("<|bos|>A") == [257, 0x41]


def test_a_model_without_begin_of_text_gets_none() -> None:
    assert byte_tokenizer().encode("A") == [0x41]


def test_special_tokens_in_a_text_count_as_such() -> None:
    assert byte_tokenizer().encode_rendered("<|bos|>A<|end|>") == [257, 0x41, 256]


def test_decoding_leaves_special_tokens_out() -> None:
    assert byte_tokenizer().decode([257, 0x41, 256]) == "A"


def test_the_longest_token_is_measured_in_bytes_of_text() -> None:
    assert byte_tokenizer().longest_token_bytes == len("日-token".encode())
    assert sentencepiece_tokenizer().longest_token_bytes == len("<0x0A>")
    assert Tokenizer.open(smollm2_files()).longest_token_bytes == 81


def test_no_text_has_more_bytes_than_its_tokens_can_stand_for() -> None:
    tokenizer = Tokenizer.open(smollm2_files())
    for text in STRINGS:
        assert len(text.encode()) <= len(tokenizer.encode(text)) * tokenizer.longest_token_bytes


def test_smollm2_has_the_vocabulary_of_its_model() -> None:
    tokenizer = Tokenizer.open(smollm2_files())
    assert tokenizer.vocab_size == 49_152
    assert tokenizer.text_of(1) == "<|im_start|>"
    assert tokenizer.text_of(60_000) is None


def test_a_damaged_tokenizer_is_one_clear_line(tmp_path: Path) -> None:
    files = smollm2_files()
    broken = tmp_path / "tokenizer.json"
    broken.write_text('{"model": {"type": "BPE",\n "vocab"')
    with pytest.raises(BadConfig, match=r"^\S*tokenizer\.json is not a usable tokenizer: .*$"):
        Tokenizer.open(type(files)(**{**vars(files), "tokenizer_path": broken}))


def test_a_way_of_decoding_that_is_not_known_is_refused(tmp_path: Path) -> None:
    inner = byte_inner()
    inner.decoder = decoders.WordPiece()
    inner.save(str(tmp_path / "tokenizer.json"))
    files = smollm2_files()
    with pytest.raises(BadConfig, match=r"tokenizer\.json: a tokenizer that decodes by WordPiece is not supported"):
        Tokenizer.open(type(files)(**{**vars(files), "tokenizer_path": tmp_path / "tokenizer.json"}))


def test_a_tokenizer_that_can_not_decode_is_refused() -> None:
    inner = sentencepiece_inner()
    inner.decoder = decoders.Sequence([decoders.Replace("_", " "), decoders.ByteFallback()])
    with pytest.raises(BadConfig, match="Replace"):
        Tokenizer(inner, vocab_size=300, bos_id=None, add_bos=False)
