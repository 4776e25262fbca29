"""What the decoder does with a report of its threads that it can't deal with."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvmesh.errors import Internal
from kvmesh.protocol.ids import PairingNumber, Rank
from kvmesh.telemetry import logs
from services.decode import decoder as decoder_module
from services.decode.__main__ import make
from services.decode.config import DecodeSettings
from services.decode.records import Receive, Received
from services.decode.threads import DecodeThreads


async def test_a_report_that_can_not_be_dealt_with_ends_the_process(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    receives: list[Receive] = []

    class Overheard(DecodeThreads):
        def __init__(self, runner: Any, receive: Receive) -> None:
            receives.append(receive)
            super().__init__(runner, receive)

    monkeypatch.setattr(decoder_module, "DecodeThreads", Overheard)
    monkeypatch.setattr(logs, "identify", lambda _: None)
    settings = DecodeSettings(
        model=str(tiny_model_dir), bootstrap="127.0.0.1:9", num_pages=8, threads=torch.get_num_threads()
    )
    life: Any = SimpleNamespace(
        address="127.0.0.1:9",
        draining=asyncio.Event(),
        set_ready=lambda *_: None,
        watch_progress=lambda *_, **__: None,
    )
    running = asyncio.ensure_future(make(settings, life).run(life))
    receives[0](Received(PairingNumber(1), Rank(0), None))  # type: ignore[arg-type]
    with pytest.raises(ExceptionGroup) as ended:
        await asyncio.wait_for(running, 10)
    (error,) = ended.value.exceptions
    assert isinstance(error, Internal)
    assert isinstance(error.__cause__, TypeError)
