"""One forward over prefill chunks and decode rows of several rooms equals each of them alone."""

from collections.abc import Callable

import pytest
import torch

from kvmesh.model.runner import Runner, Span
from tests.unit.model.tiny_models import Tiny, load, tokens_of

ROOMS = {
    "decode in a run": (list(range(8)), 29, 30),
    "decode in scattered pages": ([30, 12, 31, 13], 14, 15),
    "first chunk": (list(range(14, 20)), 0, 22),
    "chunk over a past": ([20, 22, 24, 26, 27, 28], 9, 23),
    "first token": ([39], 0, 1),
}


def put_past(runner: Runner, tokens: list[int], pages: list[int], begin: int) -> None:
    if begin:
        runner.forward([Span(pages, 0, begin, sample=False)], torch.tensor(tokens[:begin]))


@pytest.mark.parametrize("architecture", ["llama3", "qwen3"])
def test_a_mixture_equals_each_room_alone(architecture: str, tiny: Callable[[str], Tiny]) -> None:
    model = tiny(architecture)
    runner = load(model)
    prompts = {name: tokens_of(seed, end) for seed, (name, (_, _, end)) in enumerate(ROOMS.items())}
    for name, (pages, begin, _) in ROOMS.items():
        put_past(runner, prompts[name], pages, begin)
    spans = [Span(pages, begin, end, sample=name != "first chunk") for name, (pages, begin, end) in ROOMS.items()]
    rows = [token for name, (_, begin, end) in ROOMS.items() for token in prompts[name][begin:end]]

    mixed = runner.forward(spans, torch.tensor(rows))

    alone = [model.logits(prompts[name])[-1] for name in ROOMS if name != "first chunk"]
    assert mixed.shape == (4, 101)
    assert (mixed - torch.stack(alone)).abs().max() < 1e-4


def test_a_batch_writes_no_page_but_its_own(tiny: Callable[[str], Tiny]) -> None:
    runner = load(tiny("llama2"))
    runner.pool.slots.fill_(7.0)
    runner.forward([Span([3, 9], 0, 5, sample=True), Span([20], 0, 2, sample=True)], torch.tensor([1] * 7))
    written = (runner.pool.k(1) != 7.0).any(dim=0).any(dim=-1).nonzero().flatten().tolist()
    assert written == [12, 13, 14, 15, 36, 80, 81]


def test_spans_without_a_sample_give_no_logits(tiny: Callable[[str], Tiny]) -> None:
    runner = load(tiny("llama2"))
    assert runner.forward([Span([0], 0, 3, sample=False)], torch.tensor([1, 2, 3])).shape == (0, 101)


def test_pages_shared_by_two_rooms_are_read_by_both(tiny: Callable[[str], Tiny]) -> None:
    model, prompt = tiny("llama2"), tokens_of(5, 12)
    runner = load(model)
    runner.forward([Span([5, 6], 0, 8, sample=False)], torch.tensor(prompt[:8]))
    spans = [Span([5, 6, 7], 8, 12, sample=True), Span([5, 6, 30], 8, 12, sample=True)]
    logits = runner.forward(spans, torch.tensor(prompt[8:] * 2))
    expected = model.logits(prompt)[-1]
    assert (logits - expected).abs().max() < 1e-4
