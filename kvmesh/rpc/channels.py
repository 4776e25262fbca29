"""Channels to peers, and the options of the servers they reach. Called by services and clients.

Both ends ping, so that a frozen process or an unreachable host breaks its streams within the watchdog's time. gRPC itself
retries nothing that may have reached anyone: who may retry stands in `retry.py`.
"""

import grpc

from kvmesh.rpc.tls import Tls

MAX_MESSAGE_BYTES = 64 << 20
"""Above the largest prompt that must be refused politely (20 MB), and far above a frame of KV."""

_CONNECT_BACKOFF_MS = (50, 500)
"""First and longest pause between two attempts to connect: a restarted peer is found soon."""
_NEVER_MS = 2**31 - 1
"""gRPC's largest number, which it takes for never."""


def dial(
    address: str, *, watchdog_seconds: float = 2.0, resend_unsent: bool = False, tls: Tls | None = None
) -> grpc.aio.Channel:
    """A channel of its own connection, opened with the first call.

    Args:
        address: host:port, IPv6 hosts in brackets.
        watchdog_seconds: a peer that is silent for that long is lost.
        resend_unsent: for peers that end connections by their age: a call that no peer has taken, since the connection was
            ending just then, goes out on the next one. gRPC's default (transparent retry); nothing else is sent again.
        tls: what to show and whom to trust; None: in plain text.
    """
    own = _dial_options(watchdog_seconds, resend_unsent)
    if tls is None:
        return grpc.aio.insecure_channel(address, options=[*_common_options(watchdog_seconds), *own])
    named = [("grpc.ssl_target_name_override", tls.name)] if tls.name else []
    return grpc.aio.secure_channel(address, tls.channel, options=[*_common_options(watchdog_seconds), *own, *named])


def _dial_options(watchdog_seconds: float, resend_unsent: bool) -> list[tuple[str, int]]:
    first_ms, longest_ms = _CONNECT_BACKOFF_MS
    return [
        ("grpc.use_local_subchannel_pool", 1),  # two channels to one peer fail apart
        ("grpc.enable_http_proxy", 0),  # peers are never behind the environment's proxy
        ("grpc.enable_retries", int(resend_unsent)),
        ("grpc.service_config_disable_resolution", 1),  # no DNS TXT look-ups
        ("grpc.initial_reconnect_backoff_ms", first_ms),
        ("grpc.min_reconnect_backoff_ms", max(first_ms, int(watchdog_seconds * 1000))),  # also: time to connect
        ("grpc.max_reconnect_backoff_ms", longest_ms),
    ]


def server_options(watchdog_seconds: float, connection_seconds: float = 0.0) -> list[tuple[str, int]]:
    """Options of a server that permits those pings, pings its clients too, and shares its port with nobody.

    Args:
        watchdog_seconds: a client that is silent for that long is lost.
        connection_seconds: connections take no new call after about that long (a tenth more or less, so that they don't
            all end together); calls that run on them end as they would. 0: never.
    """
    return [
        *_common_options(watchdog_seconds),
        *(_aged_options(connection_seconds) if connection_seconds else ()),
        ("grpc.http2.min_ping_interval_without_data_ms", max(1, _half_ms(watchdog_seconds) // 2)),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.so_reuseport", 0),  # a second process on the port is refused instead of taking half of the calls
    ]


def _aged_options(seconds: float) -> list[tuple[str, int]]:
    return [
        ("grpc.max_connection_age_ms", max(1, min(_NEVER_MS, int(seconds * 1000)))),
        ("grpc.max_connection_age_grace_ms", _NEVER_MS),  # calls that still run are never cut
    ]


def _common_options(watchdog_seconds: float) -> list[tuple[str, int]]:
    return [
        ("grpc.keepalive_time_ms", _half_ms(watchdog_seconds)),
        ("grpc.keepalive_timeout_ms", _half_ms(watchdog_seconds)),
        ("grpc.http2.ping_timeout_ms", _half_ms(watchdog_seconds)),  # a minute otherwise, and it is this one that ends
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ]


def _half_ms(seconds: float) -> int:
    return max(1, int(seconds * 500))
