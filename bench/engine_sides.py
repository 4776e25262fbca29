"""The two sides that `bench.engine` compares, each a process of its own: `python -m bench.engine_sides kvmesh DIRECTORY`

Reads one JSON line for each figure and answers with one. A side imports its library only once it is asked, so that the
time of the import can be measured.
"""

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

PROMPT_TOKENS = 512
DECODE_PROMPT_TOKENS, DECODE_TOKENS = 64, 12
PAGE_SIZE = 16
PAGES_OF_ROOM = PROMPT_TOKENS // PAGE_SIZE
MAX_BATCH = 8
PROMPT = [(7919 * i + 17) % 40000 for i in range(PROMPT_TOKENS)]
"""Any tokens do: the time does not depend on them."""


class Side(Protocol):
    """One engine."""

    def load(self, dtype: str) -> None:
        """Makes the model of this dtype ready."""

    def prefill(self, dtype: str) -> list[float]:
        """Logits after PROMPT."""

    def decode(self, dtype: str, batch: int) -> float:
        """Seconds of DECODE_TOKENS greedy steps of `batch` sequences after DECODE_PROMPT_TOKENS each."""


class Kvmesh:
    """Our runner."""

    def __init__(self, directory: Path) -> None:
        self._torch: Any = importlib.import_module("torch")
        self._runner: Any = importlib.import_module("kvmesh.model.runner")
        self._files: Any = importlib.import_module("kvmesh.model.files").ModelFiles.open(directory)
        self._loaded: dict[str, Any] = {}

    def load(self, dtype: str) -> None:
        """See Side."""
        num_layers = self._files.config.num_layers
        num_pages = MAX_BATCH * PAGES_OF_ROOM
        self._loaded[dtype] = self._runner.Runner.load(
            self._files, 0, num_layers, dtype=dtype, device="cpu", num_pages=num_pages, page_size=PAGE_SIZE
        )

    def _forward(self, dtype: str, batch: int, begin: int, tokens: list[int]) -> Any:
        end = begin + len(tokens) // batch
        spans = [
            self._runner.Span(range(room * PAGES_OF_ROOM, (room + 1) * PAGES_OF_ROOM), begin, end, True)
            for room in range(batch)
        ]
        return self._loaded[dtype].forward(spans, self._torch.tensor(tokens))

    def prefill(self, dtype: str) -> list[float]:
        """See Side."""
        logits: list[float] = self._forward(dtype, 1, 0, PROMPT)[0].tolist()
        return logits

    def decode(self, dtype: str, batch: int) -> float:
        """See Side."""
        logits = self._forward(dtype, batch, 0, PROMPT[:DECODE_PROMPT_TOKENS] * batch)
        began = perf_counter()
        for step in range(DECODE_TOKENS):
            tokens = logits.argmax(dim=-1).tolist()
            logits = self._forward(dtype, batch, DECODE_PROMPT_TOKENS + step, tokens)
        return perf_counter() - began


class Transformers:
    """The reference, by its own `generate`."""

    def __init__(self, directory: Path) -> None:
        self._torch: Any = importlib.import_module("torch")
        self._models: Any = importlib.import_module("transformers").AutoModelForCausalLM
        self._directory = directory
        self._loaded: dict[str, Any] = {}

    def load(self, dtype: str) -> None:
        """See Side."""
        torch_dtype = {"fp32": self._torch.float32, "bf16": self._torch.bfloat16}[dtype]
        self._loaded[dtype] = self._models.from_pretrained(self._directory, dtype=torch_dtype).eval()

    def prefill(self, dtype: str) -> list[float]:
        """See Side."""
        with self._torch.inference_mode():
            ids = self._torch.tensor([PROMPT])
            logits: list[float] = self._loaded[dtype](ids, logits_to_keep=1).logits[0, -1].float().tolist()
            return logits

    def decode(self, dtype: str, batch: int) -> float:
        """The difference between one token and DECODE_TOKENS more, so that prefill does not count."""
        ids = self._torch.tensor([PROMPT[:DECODE_PROMPT_TOKENS]] * batch)
        taken = []
        for new_tokens in (1, 1 + DECODE_TOKENS):
            began = perf_counter()
            self._loaded[dtype].generate(
                ids,
                attention_mask=self._torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=new_tokens,
                max_new_tokens=new_tokens,
                pad_token_id=0,
            )
            taken.append(perf_counter() - began)
        return taken[1] - taken[0]


SIDES: dict[str, Callable[[Path], Side]] = {"kvmesh": Kvmesh, "transformers": Transformers}


def answer(side: Side, ask: dict[str, Any]) -> dict[str, object]:
    """One figure."""
    dtype = ask["dtype"]
    if "threads" in ask:
        sys.modules["torch"].set_num_threads(ask["threads"])
    began = perf_counter()
    if ask["what"] == "load":
        side.load(dtype)
        return {"seconds": round(perf_counter() - began, 3)}
    if ask["what"] == "logits":
        return {"logits": side.prefill(dtype)}
    if ask["what"] == "prefill":
        side.prefill(dtype)
        return {"seconds": perf_counter() - began}
    return {"seconds": side.decode(dtype, ask["batch"]), "tokens": DECODE_TOKENS * ask["batch"]}


def main() -> None:
    """Answers until the input ends."""
    began = perf_counter()
    side = SIDES[sys.argv[1]](Path(sys.argv[2]))
    import_seconds = round(perf_counter() - began, 3)
    for line in sys.stdin:
        print(json.dumps({"import_seconds": import_seconds, **answer(side, json.loads(line))}), flush=True)


if __name__ == "__main__":
    main()
