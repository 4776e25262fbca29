"""`python -m services.prefill`: one stage of a prefill pipeline."""

import secrets

import torch

from kvmesh.descriptor import describe
from kvmesh.kv.layout import Shard
from kvmesh.model.runner import Runner
from kvmesh.model.source import resolve
from kvmesh.protocol.fence import Fence
from kvmesh.protocol.scheduler import Limits
from kvmesh.rpc.allocator import keep_freed_megabytes
from kvmesh.rpc.life import Life, main
from kvmesh.settings import load_or_exit
from kvmesh.telemetry import logs
from kvmesh.v1 import types_pb2
from services.prefill.config import PrefillSettings
from services.prefill.life import StageIdentity
from services.prefill.registration import StageLease
from services.prefill.stage import PrefillStage


def make(settings: PrefillSettings, life: Life) -> PrefillStage:
    """Loads the stage's layers and composes the service.

    Raises:
        BadConfig: the model or a setting is unusable.
    """
    logs.identify(f"{settings.pipeline}/{settings.rank}")
    torch.set_num_threads(settings.threads)
    files = resolve(settings.model, settings.cache_dir)
    config, dtype = files.config, settings.dtype_name
    begin, end = settings.layer_range(config.num_layers)
    descriptor = describe(
        files,
        model_name=settings.model_name,
        dtype=dtype,
        layers=(begin, end),
        page_size=settings.page_size,
        num_pages=settings.num_pages,
        max_tokens=settings.max_tokens,
    )
    runner = Runner.load(
        files,
        begin,
        end,
        dtype=dtype,
        device=settings.device,
        num_pages=settings.num_pages,
        page_size=settings.page_size,
    )
    identity = StageIdentity(
        member=types_pb2.Member(incarnation=secrets.randbits(63) | 1, address=life.address),
        pipeline=settings.pipeline,
        rank=settings.rank,
        pp_size=settings.pp_size,
        descriptor=descriptor,
        shard=Shard(begin, end, 0, config.num_kv_heads, config.head_dim, dtype),
        limits=Limits(
            num_pages=settings.num_pages,
            page_size=settings.page_size,
            max_prompt_len=descriptor.max_tokens,
            step_tokens=settings.step_tokens,
            max_steps_in_flight=settings.max_steps_in_flight,
            max_waiting_rooms=settings.max_waiting_rooms,
        ),
        watchdog_seconds=settings.watchdog_seconds,
        tls=life.tls,
    )
    fence = Fence()
    lease = StageLease(
        settings.bootstrap,
        fence,
        heartbeat_seconds=settings.heartbeat_seconds,
        watchdog_seconds=settings.watchdog_seconds,
    )
    return PrefillStage(identity, lease, fence, runner)


if __name__ == "__main__":
    keep_freed_megabytes()
    settings = load_or_exit(PrefillSettings, "services.prefill")
    main("prefill", settings, lambda life: make(settings, life), load_tls=settings.load_tls)
