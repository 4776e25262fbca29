"""A model cut into stages, its KV handed over in frames: what the mesh does, without the mesh."""

from collections.abc import Callable, Sequence

import pytest
import torch

from kvmesh.kv.frames import open_frame
from kvmesh.kv.layout import plan_frames
from kvmesh.kv.pool import PagePool
from kvmesh.model.runner import Runner, Span
from tests.unit.model.tiny_models import ARCHITECTURES, Tiny, load, tokens_of

PROMPT_LEN = 51
OUTPUT_LEN = 12
CUTS = {2: [(0, 1), (1, 3)], 3: [(0, 1), (1, 2), (2, 3)]}
PIPELINE_PAGES = [30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 3, 2, 1]
"""A run and some pages out of order, of 4 tokens."""
DECODER_PAGES = [17, 4, 5, 6, 11, 12, 0, 39, 20, 21, 22, 23, 24]
"""Scattered pages of 5 tokens."""


def prefill(stages: Sequence[Runner], prompt: list[int], chunk: int) -> torch.Tensor:
    """The prompt in chunks through all stages; returns the logits of its last token."""
    out = torch.empty(0)
    for begin in range(0, len(prompt), chunk):
        end = min(begin + chunk, len(prompt))
        span = Span(PIPELINE_PAGES, begin, end, sample=end == len(prompt))
        out = torch.tensor(prompt[begin:end])
        for stage in stages:
            out = stage.forward([span], out)
    return out


def hand_over(source: PagePool, target: PagePool, num_tokens: int) -> int:
    """Sends [0, num_tokens) of all layers of `source` in small frames; returns how many."""
    pieces = plan_frames(source.shard, 0, num_tokens, frame_bytes=3000)
    for piece in pieces:
        header, payload = open_frame(source.frame(PIPELINE_PAGES, piece, room=7, pairing=1))
        target.write(DECODER_PAGES, header, payload)
    return len(pieces)


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_decode_continues_from_kv_that_stages_handed_over(
    architecture: str, num_stages: int, tiny: Callable[[str], Tiny]
) -> None:
    model, prompt = tiny(architecture), tokens_of(3, PROMPT_LEN)
    stages = [load(model, layers=layers) for layers in CUTS[num_stages]]
    decoder = Runner.load(model.files, 0, 3, dtype="fp32", device="cpu", num_pages=40, page_size=5)

    logits = prefill(stages, prompt, chunk=7)
    assert (logits[0] - model.logits(prompt)[-1]).abs().max() < 1e-4
    for stage in stages:
        assert hand_over(stage.pool, decoder.pool, PROMPT_LEN) > 1

    output = [int(logits.argmax())]
    for end in range(PROMPT_LEN + 1, PROMPT_LEN + OUTPUT_LEN):
        logits = decoder.forward([Span(DECODER_PAGES, end - 1, end, sample=True)], torch.tensor(output[-1:]))
        output.append(int(logits.argmax()))
    assert output == model.greedy(prompt, OUTPUT_LEN)


@pytest.mark.parametrize("chunk", [1, 7, 50, 51])
def test_chunks_that_divide_nothing_give_the_same_logits(chunk: int, tiny: Callable[[str], Tiny]) -> None:
    model, prompt = tiny("llama3"), tokens_of(4, PROMPT_LEN)
    logits = prefill([load(model)], prompt, chunk)
    assert (logits[0] - model.logits(prompt)[-1]).abs().max() < 1e-4


def test_a_stage_reads_only_its_own_tensors(tiny: Callable[[str], Tiny]) -> None:
    files = tiny("llama2").files
    files = type(files)(**{**vars(files), "weights": {n: p for n, p in files.weights.items() if ".layers.1." in n}})
    stage = Runner.load(files, 1, 2, dtype="fp32", device="cpu", num_pages=1, page_size=4)
    assert (stage.is_first, stage.is_last, stage.hidden_size) == (False, False, 48)


def test_the_caller_is_called_after_every_layer(tiny: Callable[[str], Tiny]) -> None:
    runner, seen = load(tiny("llama2")), []
    runner.pool.slots.zero_()
    runner.forward(
        [Span([0], 0, 2, sample=False)],
        torch.tensor([1, 2]),
        lambda: seen.append([bool(runner.pool.k(layer)[:, :2].any()) for layer in range(3)]),
    )
    assert seen == [[True, False, False], [True, True, False], [True, True, True]]
