"""The links of one generation at one stage: one for each decoder that dialled; and what the worker says, to the right one.

Called by the generation (what was computed, drawn and copied) and by the servicer (who dials, whose stream ended). A decoder
without a link is no fault: what was computed for it is discarded.
"""

from collections.abc import Callable, Sequence
from time import monotonic

from kvmesh.errors import Fenced, KvmeshError, Unavailable
from kvmesh.kv.layout import Shard, WireName
from kvmesh.protocol.ids import Generation, Incarnation, PairingKey, PairingNumber, RoomId
from kvmesh.protocol.links import replaced_by
from kvmesh.protocol.sending import Computed
from kvmesh.telemetry import metrics
from kvmesh.v1 import prefill_pb2 as pb
from services.prefill.carrier import Carrier, InSegment
from services.prefill.sender import LinkSender
from services.prefill.spans import RoomSpans
from services.prefill.worker import CopyFrame, FrameCopied, Sampled


class Links:
    """All of them, by pairing."""

    def __init__(self, generation: Generation, spans: RoomSpans, post: Callable[[CopyFrame], None]) -> None:
        """Args:
        spans: told of what is sent.
        post: asks the worker for a frame.
        """
        self._generation, self._spans, self._post = generation, spans, post
        self._senders: dict[PairingKey, LinkSender] = {}
        self._page_sizes: dict[PairingKey, int] = {}
        self._newest: dict[Incarnation, PairingNumber] = {}
        self._error: KvmeshError | None = None

    def open(self, hello: pb.LinkHello, shards: Sequence[Shard], wire: WireName, carrier: Carrier) -> LinkSender:
        """A decoder dialled. Its older link, if one stands, ends.

        Args:
            shards: what it is sent, in `wire`.

        Raises:
            Fenced: this or a newer pairing has dialled before.
            KvmeshError: the generation is over.
        """
        if self._error is not None:
            raise self._error
        key = (Incarnation(hello.decoder), PairingNumber(hello.pairing))
        for older in replaced_by(key, self._senders.keys(), self._newest):
            self._senders.pop(older).end(Unavailable("a newer pairing took over", reason="pairing_replaced"))
        link = LinkSender(key, self._generation, shards, wire, carrier, self._post, self._sent)
        self._senders[key] = link
        self._page_sizes[key] = hello.descriptor.page_size
        self._show()
        return link

    def close(self, link: LinkSender) -> None:
        """A link's stream ended."""
        link.end(Unavailable("the link ended", reason="link_lost"))
        if self._senders.get(link.key) is link:
            del self._senders[link.key]
        self._page_sizes.pop(link.key, None)
        self._show()

    def end(self, error: KvmeshError) -> None:
        """The generation is over: so is every link."""
        self._error = error
        for link in list(self._senders.values()):
            link.end(error)

    def page_size(self, key: PairingKey) -> int:
        """Tokens in a page of the decoder at the other end.

        Raises:
            Fenced: the pairing has no link.
        """
        if key not in self._senders:
            raise Fenced(f"pairing {key[1]} has no link to rank 0")
        return self._page_sizes[key]

    def computed(self, spans: Sequence[Computed], at: float) -> None:
        """KV lies in its pages since `at`, on the monotonic clock."""
        for span in spans:
            link = self._senders.get(span.key)
            if link is not None and link.computed(span):
                self._spans.to_send(span.room, at)

    def sampled(self, first: Sampled, queued_seconds: float) -> None:
        """The last rank drew a room's first token; the room had waited at rank 0 before its prefill."""
        link = self._senders.get(first.key)
        if link is not None:
            link.sampled(first, queued_seconds)

    def copied(self, report: FrameCopied) -> None:
        """The worker copied a frame, or found its room ended."""
        link = self._senders.get(report.asked.key)
        if link is not None:
            link.copied(report)

    def check_progress(self, now: float, limit_seconds: float) -> None:
        """Cuts links that have something to send and have not moved for the limit."""
        for link in list(self._senders.values()):
            link.check_progress(now, limit_seconds)

    def _sent(self, room: RoomId, num_bytes: int) -> None:
        self._spans.sent(room, num_bytes, monotonic())

    def _show(self) -> None:
        metrics.LINKS_OPEN.set(len(self._senders))
        metrics.SEGMENTS_OPEN.set(sum(isinstance(link.carrier, InSegment) for link in self._senders.values()))
