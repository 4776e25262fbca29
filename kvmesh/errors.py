"""The one error table: class → gRPC code, stable reasons, retry level.

Every layer raises these; only `kvmesh.rpc` turns them into statuses and back. Pure: no grpc, no I/O. A message is for
people, a `reason` is for programs and stays stable. Messages never hold prompts or addresses of peers.
"""

import re
from enum import Enum
from typing import ClassVar


class Retry(Enum):
    """What may be tried again after an error."""

    NEVER = "never"
    """The same input fails again."""
    CALL = "call"
    """The same call, later."""
    ROOM = "room"
    """A new room: only the gateway does so."""


class KvmeshError(Exception):
    """Base of all errors that may cross a service's edge."""

    code: ClassVar[str] = "INTERNAL"
    """Name of the gRPC status code."""
    default_reason: ClassVar[str] = "internal"
    more_reasons: ClassVar[tuple[str, ...]] = ()
    """Those that say more than the default."""
    retry: ClassVar[Retry] = Retry.NEVER

    def __init__(
        self,
        message: str,
        *,
        reason: str | None = None,
        field: str | None = None,
        retry_after_seconds: float | None = None,
    ) -> None:
        """Args:
        message: one line for people.
        reason: stable word for programs; the class's default when absent.
        field: the request or configuration field at fault, dotted.
        retry_after_seconds: when to come back, for Full and Unavailable.
        """
        super().__init__(message)
        self.message = message
        self.reason = reason or self.default_reason
        self.field = field
        self.retry_after_seconds = retry_after_seconds

    @property
    def label(self) -> str:
        """The reason, for a metric: one that this build does not give itself is `OTHER`, so that no peer makes series."""
        return self.reason if self.reason in REASONS else OTHER


class InvalidInput(KvmeshError):
    """A field of a request is missing, malformed or over its limit."""

    code = "INVALID_ARGUMENT"
    default_reason = "invalid_input"
    more_reasons = ("bad_cached_len", "message_too_large", "too_long")


class UnknownModel(KvmeshError):
    """The model is not served here."""

    code = "NOT_FOUND"
    default_reason = "unknown_model"


class DuplicateRoom(KvmeshError):
    """The room was used before."""

    code = "ALREADY_EXISTS"
    default_reason = "duplicate_room"


class Misfit(KvmeshError):
    """A deployment fault: two members that can't work together; both values are in the message."""

    code = "FAILED_PRECONDITION"
    default_reason = "misfit"
    more_reasons = ("unimplemented",)


class Full(KvmeshError):
    """At a limit; nothing was started."""

    code = "RESOURCE_EXHAUSTED"
    default_reason = "full"
    more_reasons = ("queue_full",)
    retry = Retry.ROOM


class Fenced(KvmeshError):
    """Addressed to an older room, generation, pairing, incarnation or term."""

    code = "ABORTED"
    default_reason = "fenced"
    more_reasons = ("not_paired", "stale_pairing", "stale_term")
    retry = Retry.ROOM


class Unavailable(KvmeshError):
    """A peer is away or was lost; the room, if there was one, is over."""

    code = "UNAVAILABLE"
    default_reason = "unavailable"
    more_reasons = (
        *("draining", "stopping", "unreachable", "no_pair"),
        *("lease_expired", "lease_lost", "lease_replaced", "stream_ended"),
        *("stage_hung", "stage_lost", "generation_replaced", "withdrawn"),
        *("link_lost", "link_stalled", "pairing_lost", "pairing_replaced"),
        *("decoder_hung", "handed_over", "room_lost", "in_lost_step"),
        "tls",
    )
    retry = Retry.ROOM


class Corrupt(KvmeshError):
    """KV or a record was damaged on the way."""

    code = "DATA_LOSS"
    default_reason = "checksum"
    more_reasons = ("bad_token", "frame", "outside_plan", "partial_overlap", "welcome")
    retry = Retry.ROOM


class DeadlineExceeded(KvmeshError):
    """The caller's time is over."""

    code = "DEADLINE_EXCEEDED"
    default_reason = "deadline"


class Cancelled(KvmeshError):
    """The caller went away."""

    code = "CANCELLED"
    default_reason = "cancelled"


class Fault(KvmeshError):
    """An invariant of the protocol was broken by a peer: ends the generation, names the culprit."""

    code = "INTERNAL"
    default_reason = "log_fault"
    more_reasons = ("no_transition", "stage_failed")
    retry = Retry.ROOM


class Internal(KvmeshError):
    """A bug: the traceback is in the log of the service that had it."""


_KINDS = KvmeshError.__subclasses__()
CODES = tuple(sorted({kind.code for kind in _KINDS}))
"""Every code that an error of the table has; OK is none."""
REASONS = tuple(sorted({reason for kind in _KINDS for reason in (kind.default_reason, *kind.more_reasons)}))
"""Every reason that is given in the mesh. An error keeps its reason from service to service, so any may end anything."""


class BadConfig(Exception):
    """Configuration or model file unusable; a service that meets it prints one line and exits 2."""


OTHER = "other"
"""Instead of a reason that is none, and of all that this build does not know where they are counted."""


def reason_heard(text: str) -> str:
    """A reason as a peer gave it. A newer peer may have words of its own; what is no word at all is `OTHER`."""
    return text if re.fullmatch(r"[a-z_]{1,40}", text) else OTHER
