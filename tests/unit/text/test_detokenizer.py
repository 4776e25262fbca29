"""Pieces never split a character, and joined they are what decoding at once gives."""

import random
from collections.abc import Sequence

import pytest

from kvmesh.text.detokenizer import IncrementalDetokenizer
from kvmesh.text.tokenizer import Tokenizer
from tests.unit.model_source.smollm2 import smollm2_files
from tests.unit.nasty import STRINGS, random_strings
from tests.unit.text.tokenizers_made import byte_tokenizer, sentencepiece_tokenizer


def pieces(tokenizer: Tokenizer, ids: Sequence[int], *, continues: bool = False) -> list[str]:
    """One token at a time, then the end."""
    detokenizer = IncrementalDetokenizer(tokenizer, continues=continues)
    return [*(detokenizer.push([token]) for token in ids), detokenizer.flush()]


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return Tokenizer.open(smollm2_files())


@pytest.fixture(params=["smollm2", "bytes", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest, smollm2: Tokenizer) -> Tokenizer:
    made = {"smollm2": lambda: smollm2, "bytes": byte_tokenizer, "sentencepiece": sentencepiece_tokenizer}
    return made[request.param]()


def test_nasty_strings_come_out_whole(tokenizer: Tokenizer) -> None:
    for text in [*STRINGS, *random_strings(200)]:
        ids = tokenizer.encode(text)
        assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


def test_no_piece_splits_a_character(tokenizer: Tokenizer) -> None:
    for text in [*STRINGS, *random_strings(200)]:
        if "\ufffd" not in text:
            assert not any("\ufffd" in piece for piece in pieces(tokenizer, tokenizer.encode(text)))


def test_random_tokens_come_out_as_decoding_at_once_gives(tokenizer: Tokenizer) -> None:
    rng = random.Random(3)
    for _ in range(500):
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randrange(30))]
        assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


def test_it_makes_no_difference_how_tokens_are_grouped(tokenizer: Tokenizer) -> None:
    rng = random.Random(4)
    ids = tokenizer.encode("Grüße 😀😃 日本語 end")
    for _ in range(50):
        detokenizer = IncrementalDetokenizer(tokenizer)
        cuts = sorted(rng.sample(range(len(ids)), k=4))
        parts = [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
        assert "".join(map(detokenizer.push, parts)) + detokenizer.flush() == tokenizer.decode(ids)


def test_a_character_comes_with_its_last_byte() -> None:
    assert pieces(byte_tokenizer(), list("é€😀".encode())) == ["", "é", "", "", "€", "", "", "", "😀", ""]


def test_an_unfinished_character_is_replaced_at_the_end() -> None:
    assert pieces(byte_tokenizer(), "😀".encode()[:3]) == ["", "", "", "\ufffd"]


def test_bytes_that_are_no_character_are_replaced_and_text_goes_on() -> None:
    assert "".join(pieces(byte_tokenizer(), [0xFF, 0x41, 0xC3, 0x41])) == "\ufffdA\ufffdA"


def test_special_tokens_are_not_text_and_user_defined_ones_are() -> None:
    tokenizer = byte_tokenizer()
    think, sun = (tokenizer.encode(text) for text in ("<think>", "日-token"))
    assert len(think) == len(sun) == 1
    assert "".join(pieces(tokenizer, [256, 0x41, *think, *sun, 257])) == "A<think>日-token"


def test_a_special_token_does_not_end_a_character() -> None:
    assert pieces(byte_tokenizer(), [0xC3, 257, 0xA9]) == ["", "", "é", ""]


def test_ids_without_a_text_are_passed_over() -> None:
    assert pieces(byte_tokenizer(), [0x41, 299, 0x42]) == ["A", "", "B", ""]


def test_a_run_of_byte_tokens_is_text_only_as_a_whole() -> None:
    tokenizer = sentencepiece_tokenizer()
    a = tokenizer.encode("a")[-1]
    euro = [3 + byte for byte in "€".encode()]
    assert pieces(tokenizer, [*euro, a]) == ["", "", "", "€ a", ""]
    assert "".join(pieces(tokenizer, [*euro, 3 + 0xFF, a])) == "\ufffd" * 4 + " a"


def test_the_space_before_a_text_is_dropped_once_and_kept_after_a_prompt() -> None:
    tokenizer = sentencepiece_tokenizer()
    ids = tokenizer.encode("a a")
    assert "".join(pieces(tokenizer, ids)) == "a a"
    assert "".join(pieces(tokenizer, ids, continues=True)) == " a a"


def test_the_cost_of_a_token_does_not_grow_with_what_is_held_back() -> None:
    # A hundred thousand bytes that never become a character: a second look at them all would take hours.
    detokenizer = IncrementalDetokenizer(byte_tokenizer())
    out = "".join(detokenizer.push([0x80]) for _ in range(100_000))
    assert out + detokenizer.flush() == "\ufffd" * 100_000
