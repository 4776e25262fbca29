"""Metrics: every name of the system, once. Used by every layer; served by the life of a process on a port of its own.

A metric belongs to the services named with it, and only their pages show it. Units end the names, labels are bounded: a
state, a reason, a method; never a room, an address or text. What is counted by a label whose values are known begins at 0
with the process: Prometheus can't see a series begin, so the first events of each value would be in no rate.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.metrics import MetricWrapperBase

from kvmesh.errors import CODES, OTHER, REASONS
from kvmesh.protocol.receiving import Outcome

PREFILL, DECODE, GATEWAY, BOOTSTRAP = "prefill", "decode", "gateway", "bootstrap"
EVERY = (PREFILL, DECODE, GATEWAY, BOOTSTRAP)

_STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
"""For steps and calls inside the mesh."""
# The edges that OpenTelemetry's conventions for generative AI advise (gen_ai.server.time_to_first_token,
# gen_ai.server.time_per_output_token with three finer edges, gen_ai.server.request.duration, gen_ai.client.token.usage).
_FIRST_TOKEN_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_TOKEN_GAP_SECONDS = (
    *(0.001, 0.0025, 0.005),
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
)
_REQUEST_SECONDS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_TOKENS = tuple(4**n for n in range(11))
"""Up to a million."""

# They are a line for each series that no one reads: a restart shows in process_start_time_seconds.
disable_created_metrics()  # type: ignore[no-untyped-call]

FIRST_TOKEN_PARTS = ("assign", "reserve", "queue", "prefill", "transfer_tail", "join", "other")
"""What the time to the first token is made of, in order; see Timing in types.proto."""

DIGEST_METRIC_BYTES = 6
"""Of a digest that a metric shows: 48 bits are exact in the 64-bit floats of Prometheus."""

_Metric = TypeVar("_Metric", bound=MetricWrapperBase)
_members: list[tuple[MetricWrapperBase, tuple[str, ...]]] = []


def _of(
    services: Sequence[str],
    make: Callable[..., _Metric],
    name: str,
    text: str,
    *,
    known: Iterable[str] = (),
    **more: object,
) -> _Metric:
    """A metric of some services.

    Args:
        known: values of its one label that are there from the start.
    """
    metric = make(f"kvmesh_{name}", text, registry=None, **more)
    for value in known:
        metric.labels(value)
    _members.append((metric, tuple(services)))
    return metric


def page_of(service: str) -> CollectorRegistry:
    """What the page of a service shows: its metrics, and the process's own. An unknown service shows every metric."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    for metric, services in _members:
        if service in services or service not in EVERY:
            registry.register(metric)
    return registry


# Every service.
READY = _of(EVERY, Gauge, "ready", "1 while the service is able to serve.")
LIVE = _of(EVERY, Gauge, "live", "1 while everything that should make progress does, the event loop included.")
LOOP_LAG_SECONDS = _of(
    EVERY,
    Gauge,
    "loop_lag_seconds",
    "How late the event loop's last beat was, or, if that is more, the one that is due.",
)
LOOP_LATE_SECONDS_TOTAL = _of(
    EVERY,
    Counter,
    "loop_late_seconds_total",
    "How late the event loop's beats came, added up: also a stall between two scrapes shows.",
)
BUILD_INFO = _of(EVERY, Gauge, "build_info", "1, labelled with the version that runs.", labelnames=("version",))
RPC_ERRORS_TOTAL = _of(
    EVERY,
    Counter,
    "rpc_errors_total",
    "Calls answered with an error, by the reason that the caller was told. ABORTED: fenced.",
    labelnames=("method", "code", "reason"),
)
RECONNECTS_TOTAL = _of(
    EVERY, Counter, "reconnects_total", "Leases, watches, pairings and registry calls tried again after a loss."
)

# Members that hold KV.
PAGES = _of(
    (PREFILL, DECODE),
    Gauge,
    "pages",
    "Pages of KV by what they are for: free, held (prefill), receiving KV or running (decode). Together the pool.",
    labelnames=("state",),
)
ROOMS_OPEN = _of(
    (PREFILL, DECODE, GATEWAY),
    Gauge,
    "rooms_open",
    "Rooms that have not ended, those that wait included; at a stage behind rank 0, those that its log holds.",
)
ROOMS_WAITING = _of((PREFILL, DECODE), Gauge, "rooms_waiting", "Rooms that wait for pages or a place.")
ROOMS_RUNNING = _of((PREFILL, DECODE), Gauge, "rooms_running", "Rooms that hold pages.")
ROOMS_ENDED_TOTAL = _of(
    (PREFILL, DECODE),
    Counter,
    "rooms_ended_total",
    "Rooms ended, each once: done, or dropped (rank 0); finished, or cancelled (decoder); else why it was lost or refused.",
    labelnames=("reason",),
    known=("done", "dropped", "finished", "cancelled", *REASONS, OTHER),
)

# Prefill.
STAGE_INFO = _of(
    (PREFILL,),
    Gauge,
    "stage_info",
    "1, labelled with the stage's place: join it to other series of the page by instance.",
    labelnames=("pipeline", "rank", "pp_size"),
)
GENERATIONS_TOTAL = _of((PREFILL,), Counter, "generations_total", "Generations this stage was part of.")
GENERATIONS_ENDED_TOTAL = _of(
    (PREFILL,),
    Counter,
    "generations_ended_total",
    "Generations that ended here, by why.",
    labelnames=("reason",),
    known=(*REASONS, OTHER),
)
LOG_STEPS_RECEIVED = _of((PREFILL,), Gauge, "log_steps_received", "Steps of this generation's log that came here.")
LOG_STEPS_APPLIED = _of((PREFILL,), Gauge, "log_steps_applied", "Steps of this generation's log applied here.")
LOG_STEPS_CONFIRMED = _of(
    (PREFILL,), Gauge, "log_steps_confirmed", "Steps of this generation's log applied here and by every rank behind."
)
LOG_DIGEST = _of(
    (PREFILL,),
    Gauge,
    "log_digest",
    "First 48 bits of the digest of the applied log: equal on all stages of a generation at equal log_steps_applied.",
)
LOG_LAG_STEPS = _of((PREFILL,), Gauge, "log_lag_steps", "Steps that rank 0 wrote and this stage has not applied.")
LOG_AGE_SECONDS = _of(
    (PREFILL,), Gauge, "log_age_seconds", "Time since the stage last made progress on a step; 0 when it owes none."
)
STEPS_TOTAL = _of((PREFILL,), Counter, "steps_total", "Steps of the log applied.")
STEP_SECONDS = _of(
    (PREFILL,), Histogram, "step_seconds", "Time to compute one step that has work.", buckets=_STEP_SECONDS
)
PREFILL_TOKENS_TOTAL = _of((PREFILL,), Counter, "prefill_tokens_total", "Prompt tokens computed.")
QUEUED_PREFILL_TOKENS = _of(
    (PREFILL,), Gauge, "queued_prefill_tokens", "Prompt tokens accepted, not computed (rank 0)."
)
QUEUED_PREFILL_SECONDS = _of(
    (PREFILL,),
    Gauge,
    "queued_prefill_seconds",
    "How long this pipeline will take for queued_prefill_tokens, at the rate it has shown lately (rank 0).",
)
ADMISSION_SECONDS = _of(
    (PREFILL,),
    Histogram,
    "admission_seconds",
    "From a decoder's Admit until the worker takes up the room's first tokens (rank 0).",
    buckets=_FIRST_TOKEN_SECONDS,
)
STEPS_IN_FLIGHT = _of((PREFILL,), Gauge, "steps_in_flight", "Steps that not every rank has applied (rank 0).")
LINKS_OPEN = _of((PREFILL,), Gauge, "links_open", "Links to decoders that stand.")
SEGMENTS_OPEN = _of(
    (PREFILL,), Gauge, "segments_open", "Links that carry KV in memory shared with a decoder on the same host."
)
KV_SENT_BYTES_TOTAL = _of((PREFILL,), Counter, "kv_sent_bytes_total", "Payload of KV frames sent.")
KV_SEND_SECONDS_TOTAL = _of(
    (PREFILL,),
    Counter,
    "kv_send_seconds_total",
    "Time that links had KV to send, waits for a decoder's credit included: bytes by seconds is the rate per link.",
)

# Decode.
PAIRINGS_STANDING = _of((DECODE,), Gauge, "pairings_standing", "Pairings that stand.")
PAIRINGS_TOTAL = _of((DECODE,), Counter, "pairings_total", "Pairings made.")
PAIRINGS_ENDED_TOTAL = _of(
    (DECODE,), Counter, "pairings_ended_total", "Pairings ended.", labelnames=("reason",), known=(*REASONS, OTHER)
)
KV_RECEIVED_BYTES_TOTAL = _of((DECODE,), Counter, "kv_received_bytes_total", "Payload of KV frames received.")
RESERVE_SECONDS = _of(
    (DECODE,),
    Histogram,
    "reserve_seconds",
    "From a room's arrival until its pages are reserved and rank 0 is asked.",
    buckets=_FIRST_TOKEN_SECONDS,
)
TRANSFER_TAIL_SECONDS = _of(
    (DECODE,),
    Histogram,
    "transfer_tail_seconds",
    "From a room's first token until the last of its KV arrived: what the transfer costs after the last compute.",
    buckets=_FIRST_TOKEN_SECONDS,
)
FRAMES_TOTAL = _of(
    (DECODE,),
    Counter,
    "frames_total",
    "Frames received: written, repeated, late (no such room), foreign (another pairing), or corrupt (checksum, shape).",
    labelnames=("outcome",),
    known=(*(outcome.value for outcome in Outcome), "corrupt"),
)
DECODE_STEP_SECONDS = _of(
    (DECODE,), Histogram, "decode_step_seconds", "Time of one decode step.", buckets=_STEP_SECONDS
)
DECODE_BATCH_ROOMS = _of((DECODE,), Gauge, "decode_batch_rooms", "Rooms in the last decode step.")
DECODE_TOKENS_TOTAL = _of((DECODE,), Counter, "decode_tokens_total", "Tokens decoded.")

# Gateway.
REQUESTS_TOTAL = _of(
    (GATEWAY,),
    Counter,
    "requests_total",
    "Requests ended, by their gRPC code.",
    labelnames=("code",),
    known=("OK", *CODES),
)
REQUESTS_OPEN = _of((GATEWAY,), Gauge, "requests_open", "Requests being served.")
ATTEMPTS_TOTAL = _of((GATEWAY,), Counter, "attempts_total", "Rooms given to requests.")
ATTEMPTS_FAILED_TOTAL = _of(
    (GATEWAY,),
    Counter,
    "attempts_failed_total",
    "Rooms lost or refused, by why.",
    labelnames=("reason",),
    known=(*REASONS, OTHER),
)
REQUEST_SECONDS = _of(
    (GATEWAY,), Histogram, "request_seconds", "Arrival until the last token was written.", buckets=_REQUEST_SECONDS
)
TIME_TO_FIRST_TOKEN_SECONDS = _of(
    (GATEWAY,),
    Histogram,
    "time_to_first_token_seconds",
    "Arrival until the first token came; it is written a moment later.",
    buckets=_FIRST_TOKEN_SECONDS,
)
TIME_TO_FIRST_TOKEN_PART_SECONDS = _of(
    (GATEWAY,),
    Histogram,
    "time_to_first_token_part_seconds",
    "The time to the first token by its parts along the critical path; of one request they add up to it.",
    labelnames=("part",),
    known=FIRST_TOKEN_PARTS,
    buckets=_FIRST_TOKEN_SECONDS,
)
TOKEN_GAP_SECONDS = _of(
    (GATEWAY,),
    Histogram,
    "token_gap_seconds",
    "Between a token of a request and the one before. Of tokens that come together the first was waited for, the others 0.",
    buckets=_TOKEN_GAP_SECONDS,
)
PROMPT_TOKENS = _of((GATEWAY,), Histogram, "prompt_tokens", "Tokens of the prompt of a request.", buckets=_TOKENS)
OUTPUT_TOKENS = _of((GATEWAY,), Histogram, "output_tokens", "Tokens answered to a request.", buckets=_TOKENS)

# Bootstrap.
TERM = _of((BOOTSTRAP,), Gauge, "term", "This registry's term.")
LEASES = _of((BOOTSTRAP,), Gauge, "leases", "Leases that run.", labelnames=("role",))
PIPELINES_WHOLE = _of((BOOTSTRAP,), Gauge, "pipelines_whole", "Pipelines that serve.")
ROOMS_MINTED_TOTAL = _of((BOOTSTRAP,), Counter, "rooms_minted_total", "Rooms minted.")
GENERATIONS_MINTED_TOTAL = _of((BOOTSTRAP,), Counter, "generations_minted_total", "Generations minted.")
ASSIGN_SECONDS = _of(
    (BOOTSTRAP,),
    Histogram,
    "assign_seconds",
    "Time AssignRoom took, waits for a pair included.",
    buckets=_FIRST_TOKEN_SECONDS,
)
ROOM_REQUESTS_HELD = _of((BOOTSTRAP,), Gauge, "room_requests_held", "Calls of AssignRoom that wait for a pair.")
LEASES_ENDED_TOTAL = _of(
    (BOOTSTRAP,), Counter, "leases_ended_total", "Leases ended.", labelnames=("reason",), known=(*REASONS, OTHER)
)
UNKNOWN_MESSAGES_TOTAL = _of(
    (BOOTSTRAP,), Counter, "unknown_messages_total", "Messages on lease streams of a kind not known here."
)
