"""What the format of the way does to answers: logits and greedy tokens of the real model after its prompts' KV travelled.

    python -m bench.kv_wire [--tokens 64] [--json]

Each prompt is prefilled once; its KV is encoded and decoded as a frame's is (`kvmesh.kv.wire`) and decoding goes on from the
result, twice: fed the reference's tokens, so that logits compare step by step, and by its own. The reference is the same with
fp32 on the way, which changes nothing. Memory is fp32 on both sides, so that the way alone differs. No service, no network.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kvmesh.kv.layout import BLOCK_TOKENS, WireName, payload_bytes
from kvmesh.kv.wire import decode, encode
from kvmesh.model.runner import Runner, Span
from kvmesh.model.source import resolve
from kvmesh.text.tokenizer import Tokenizer

WAYS: tuple[tuple[WireName, int], ...] = (
    ("bf16", 0),
    ("fp16", 0),
    *(("int8", block) for block in (1, 16, 64)),
    *(("fp8", block) for block in (1, 16)),
)
"""Format, and tokens that share a scale; what ships is BLOCK_TOKENS."""
PROMPTS = (
    "The tide turned before dawn, and the harbour master wrote down every boat that left: its name, its load, the hour.",
    "def median(values):\n    ordered = sorted(values)\n    middle = len(ordered) // 2\n",
    "A short history of the bicycle begins with the draisine of 1817, which had neither pedals nor brakes, and",
    "Question: why does bread rise? Answer: yeast eats the sugar in the dough and gives off carbon dioxide, which",
    "To change a bicycle tube you need two levers, a pump and a new tube. First, take the wheel off the frame, then",
    "The capital of France is Paris, the capital of Italy is Rome, the capital of Spain is Madrid, the capital of",
    "Dear neighbours, the lift will be out of service on Thursday from eight in the morning until noon, because",
    "In 1905 a clerk in the patent office at Bern published four papers that changed physics. The first of them",
)
PAGE_SIZE, ROOM_PAGES = 16, 12


@dataclass(frozen=True, slots=True)
class Way:
    """What one format did."""

    wire: WireName
    block_tokens: int
    bytes_saved: float
    """Of fp32, as a share."""
    largest_difference: float
    """Of a logit, over all steps and words."""
    mean_difference: float
    top_1_agreement: float
    """Share of steps whose top word is the reference's, fed its tokens."""
    equal_answers: int
    equal_tokens: float
    """Share of tokens before an answer's first other one."""


class Bench:
    """The model, and the KV of all prompts as prefill left it."""

    def __init__(self, num_tokens: int, cache_dir: Path) -> None:
        files = resolve("smollm2", cache_dir)
        words = Tokenizer.open(files)
        self.prompts = [words.encode(text) for text in PROMPTS]
        self.num_tokens = num_tokens
        self.runner = Runner.load(
            files,
            0,
            files.config.num_layers,
            dtype="fp32",
            device="cpu",
            num_pages=ROOM_PAGES * len(PROMPTS),
            page_size=PAGE_SIZE,
        )
        self.firsts: list[int] = []
        self._kv: list[Tensor] = []
        for at, prompt in enumerate(self.prompts):
            span = Span(pages=self._pages(at), begin=0, end=len(prompt), sample=True)
            self.firsts.append(int(self.runner.forward([span], torch.tensor(prompt)).argmax()))
            self._kv.append(self._slots(at)[:, :, :, : len(prompt)].clone())

    def _pages(self, at: int) -> list[int]:
        return list(range(at * ROOM_PAGES, (at + 1) * ROOM_PAGES))

    def _slots(self, at: int) -> Tensor:
        tokens = ROOM_PAGES * PAGE_SIZE
        return self.runner.pool.slots[:, :, :, at * tokens : (at + 1) * tokens]

    def travel(self, wire: WireName, block_tokens: int) -> float:
        """Puts the prompts' KV in place as it arrives; returns the share of fp32's bytes that it saved."""
        taken, full = 0, 0
        for at, kv in enumerate(self._kv):
            layers, _, heads, tokens, head_dim = kv.shape
            size = payload_bytes(wire, layers, heads, tokens, head_dim, block_tokens or 1)
            payload = memoryview(bytearray(size))
            encode(kv, wire, payload, block_tokens)
            shape = (layers, 2, heads, tokens, head_dim)
            self._slots(at)[:, :, :, :tokens].copy_(decode(payload, wire, shape, block_tokens, "fp32"))
            taken, full = taken + size, full + kv.nbytes
        return 1 - taken / full

    def go_on(self, fed: Sequence[Sequence[int]] | None = None) -> tuple[list[list[int]], Tensor]:
        """Greedy tokens of all prompts and the logits [steps, prompts, V]; `fed`: tokens to go on with instead of its own."""
        answers, steps = [[first] for first in self.firsts], []
        for step in range(self.num_tokens - 1):
            last = [(fed or answers)[at][step] for at in range(len(answers))]
            lengths = [len(prompt) + step for prompt in self.prompts]
            spans = [Span(pages=self._pages(at), begin=n, end=n + 1, sample=True) for at, n in enumerate(lengths)]
            logits = self.runner.forward(spans, torch.tensor(last))
            steps.append(logits)
            for answer, token in zip(answers, logits.argmax(1).tolist(), strict=True):
                answer.append(token)
        return answers, torch.stack(steps)


def measure(bench: Bench) -> list[Way]:
    """Every way against fp32."""
    bench.travel("fp32", 0)
    wanted, exact = bench.go_on()
    ways = []
    for wire, block in WAYS:
        saved = bench.travel(wire, block)
        _, logits = bench.go_on(wanted)
        difference = (logits - exact).abs()
        agree = (logits.argmax(2) == exact.argmax(2)).float().mean()
        bench.travel(wire, block)
        answers, _ = bench.go_on()
        equal = [_equal_tokens(own, want) for own, want in zip(answers, wanted, strict=True)]
        ways.append(
            Way(
                wire,
                block,
                saved,
                float(difference.max()),
                float(difference.mean()),
                float(agree),
                sum(n == bench.num_tokens for n in equal),
                sum(equal) / (len(equal) * bench.num_tokens),
            )
        )
    return ways


def _equal_tokens(own: Sequence[int], wanted: Sequence[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(own, wanted, strict=True)) if a != b), len(wanted))


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=64, help="of each answer (default %(default)s, at most 128)")
    parser.add_argument("--cache-dir", type=Path, default=Path("~/.cache/kvmesh"))
    parser.add_argument("--json", action="store_true", help="the last line is JSON")
    options = parser.parse_args()
    if not 2 <= options.tokens <= 128:
        parser.error("--tokens is 2 to 128")
    ways = measure(Bench(options.tokens, options.cache_dir.expanduser()))
    print(f"{len(PROMPTS)} prompts, {options.tokens} tokens each; fp32 memory; a build sends blocks of {BLOCK_TOKENS}")
    print("way   block  saved  max diff  mean diff  top-1   answers equal  tokens equal")
    for way in ways:
        print(
            f"{way.wire:<5} {way.block_tokens or '-':>5} {way.bytes_saved:>6.1%} {way.largest_difference:>9.3f} "
            f"{way.mean_difference:>10.4f} {way.top_1_agreement:>6.1%} {way.equal_answers:>11}/{len(PROMPTS)} "
            f"{way.equal_tokens:>13.1%}"
        )
    if options.json:
        print(json.dumps([{name: getattr(way, name) for name in Way.__slots__} for way in ways]))


if __name__ == "__main__":
    main()
