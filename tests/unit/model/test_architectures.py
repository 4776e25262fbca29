"""Each architecture's logits equal those of transformers."""

from collections.abc import Callable

import pytest
import torch

from kvmesh.model.runner import Runner, Span
from tests.unit.model.tiny_models import ARCHITECTURES, Tiny, load, tokens_of

TOLERANCE = 1e-4


def logits_of_last_tokens(runner: Runner, tokens: list[int], ends: list[int]) -> torch.Tensor:
    """Logits of the tokens before each of `ends`, each computed in a forward of its own from token 0."""
    rows = [runner.forward([Span(list(range(40)), 0, end, sample=True)], torch.tensor(tokens[:end])) for end in ends]
    return torch.cat(rows)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_equal_those_of_transformers(architecture: str, tiny: Callable[[str], Tiny]) -> None:
    model, ends = tiny(architecture), [1, 2, 37, 90]
    tokens = tokens_of(1, 90)
    ours = logits_of_last_tokens(load(model), tokens, ends)
    theirs = model.logits(tokens)[[end - 1 for end in ends]]
    assert ours.dtype == torch.float32
    assert (ours - theirs).abs().max() < TOLERANCE
    assert theirs.std() > 0.5  # else the comparison would say little


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_bf16_logits_stay_close_to_fp32(architecture: str, tiny: Callable[[str], Tiny]) -> None:
    model, tokens = tiny(architecture), tokens_of(2, 50)
    ours = logits_of_last_tokens(load(model, "bf16"), tokens, [50])
    theirs = model.logits(tokens)[[49]]
    similarity = torch.nn.functional.cosine_similarity(ours, theirs)
    assert ours.dtype == torch.float32
    assert similarity.item() > 0.999


def test_weights_in_several_shards_are_found(tiny: Callable[[str], Tiny]) -> None:
    assert len(set(tiny("llama3").files.weights.values())) > 3


def test_a_token_outside_the_vocabulary_is_refused(tiny: Callable[[str], Tiny]) -> None:
    runner = load(tiny("llama2"))
    with pytest.raises(IndexError):
        runner.forward([Span([0], 0, 1, sample=True)], torch.tensor([101]))


def test_pages_that_do_not_reach_the_end_of_a_span_are_refused(tiny: Callable[[str], Tiny]) -> None:
    runner = load(tiny("llama2"))
    with pytest.raises(IndexError):
        runner.forward([Span([0], 0, 5, sample=True)], torch.tensor([1] * 5))
