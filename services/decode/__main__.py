"""`python -m services.decode`: one decoder."""

import secrets

import torch

from kvmesh.descriptor import describe
from kvmesh.model.runner import Runner
from kvmesh.model.source import resolve
from kvmesh.protocol.rooms import Limits
from kvmesh.rpc.allocator import keep_freed_megabytes
from kvmesh.rpc.life import Life, main
from kvmesh.settings import load_or_exit
from kvmesh.telemetry import logs
from kvmesh.v1 import types_pb2
from services.decode.config import DecodeSettings
from services.decode.decoder import Decoder
from services.decode.identity import DecoderIdentity


def make(settings: DecodeSettings, life: Life) -> Decoder:
    """Loads the model and composes the service.

    Raises:
        BadConfig: the model or a setting is unusable.
    """
    tls = settings.load_tls()
    incarnation = secrets.randbits(63) | 1
    logs.identify(f"d-{incarnation:016x}"[:8])
    torch.set_num_threads(settings.threads)
    files = resolve(settings.model, settings.cache_dir)
    dtype, num_layers = settings.dtype_name, files.config.num_layers
    descriptor = describe(
        files,
        model_name=settings.model_name,
        dtype=dtype,
        layers=(0, num_layers),
        page_size=settings.page_size,
        num_pages=settings.num_pages,
        max_tokens=settings.max_tokens,
    )
    runner = Runner.load(
        files,
        0,
        num_layers,
        dtype=dtype,
        device=settings.device,
        num_pages=settings.num_pages,
        page_size=settings.page_size,
    )
    identity = DecoderIdentity(
        member=types_pb2.Member(incarnation=incarnation, address=life.address),
        descriptor=descriptor,
        window_bytes=settings.window_mib << 20,
        watchdog_seconds=settings.watchdog_seconds,
        shared_cells=settings.shared_cells,
        in_flight_bytes=settings.in_flight_mib << 20,
        tls=tls,
        kv_wire=settings.kv_wire,
    )
    limits = Limits(
        num_pages=settings.num_pages,
        page_size=settings.page_size,
        max_tokens=descriptor.max_tokens,
        max_running_rooms=settings.max_running_rooms,
        max_waiting_rooms=settings.max_waiting_rooms,
    )
    return Decoder(
        identity,
        limits,
        runner,
        bootstrap=settings.bootstrap,
        heartbeat_seconds=settings.heartbeat_seconds,
        drain_seconds=settings.drain_seconds,
    )


if __name__ == "__main__":
    keep_freed_megabytes()
    settings = load_or_exit(DecodeSettings, "services.decode")
    main("decode", settings, lambda life: make(settings, life))
