"""A real process of one service, whose behaviour the tests choose. Serves kvmesh.v1.DecodeService, badly."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from kvmesh.errors import BadConfig, Misfit
from kvmesh.rpc.life import Life, ServeSettings, main
from kvmesh.settings import load_or_exit, setting
from kvmesh.telemetry import traces
from kvmesh.v1 import decode_pb2 as pb
from kvmesh.v1.decode_pb2_grpc import DecodeServiceServicer, add_DecodeServiceServicer_to_server


@dataclass(frozen=True, kw_only=True)
class ToySettings(ServeSettings):
    toy: str = setting("serve", help="what it does")


class Toy(DecodeServiceServicer):
    names = ("kvmesh.v1.DecodeService",)

    def __init__(self, toy: str, life: Life) -> None:
        self.toy = toy
        if toy == "misfit":
            raise Misfit("page_size is 16 here and 32 at rank 1")
        if toy == "bad_config":
            raise BadConfig("model is unusable:\nno weights")
        if toy == "stuck":
            life.watch_progress("the worker", lambda: 60.0, limit_seconds=1.0)

    def add_to(self, server: Any) -> None:
        add_DecodeServiceServicer_to_server(self, server)

    async def GenerateRoom(self, request: Any, context: Any) -> AsyncIterator[pb.GenerateRoomResponse]:  # noqa: N802
        traces.start("called", parent=traces.of_call(context.invocation_metadata())).end()
        print("called", file=sys.stderr, flush=True)
        while True:
            yield pb.GenerateRoomResponse(index=1)
            await asyncio.sleep(0.05)

    async def run(self, life: Life) -> None:
        life.set_ready(True)
        if self.toy == "group":
            async with asyncio.TaskGroup() as group:
                group.create_task(_fail(RuntimeError("the worker broke")))
                group.create_task(asyncio.Event().wait())
        if self.toy == "misfit_group":
            async with asyncio.TaskGroup() as group:
                group.create_task(_fail(Misfit("dtype is fp32 here and bf16 at rank 1")))
        if self.toy == "stop":
            life.stop(4)
        await life.draining.wait()
        print("drains", file=sys.stderr, flush=True)
        if self.toy == "slow":
            await asyncio.Event().wait()
        if self.toy == "hang":
            time.sleep(600)  # noqa: ASYNC251  # the loop itself is stuck
        print("drained", file=sys.stderr, flush=True)


async def _fail(error: Exception) -> None:
    raise error


if __name__ == "__main__":
    settings = load_or_exit(ToySettings, "toy_service")
    main("decode", settings, lambda life: Toy(settings.toy, life))
