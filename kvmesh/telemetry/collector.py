"""The SDK's side of `otlp`: spans in batches to a collector. Imported only where an endpoint is named; needs the extra."""

import logging
from collections.abc import Sequence

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult

from kvmesh.telemetry import logs

log = logs.get(__name__)

_SPEAKERS = ("opentelemetry.exporter.otlp.proto.grpc.exporter", "opentelemetry.sdk._shared_internal")
"""Who would log each batch of spans that a collector does not take."""


def export_as(attributes: dict[str, str]) -> TracerProvider:
    """From now on every span goes out; shut the provider down to send the last.

    Args:
        attributes: who the spans are of, e.g. "service.name".
    """
    provider = TracerProvider(resource=Resource.create(attributes))
    provider.add_span_processor(BatchSpanProcessor(_Exporter()))
    trace.set_tracer_provider(provider)
    return provider


class _Exporter(OTLPSpanExporter):
    """One that tells once what is wrong with its collector, and once that nothing is."""

    def __init__(self) -> None:
        super().__init__()
        self._once = _Once()
        for name in _SPEAKERS:
            logging.getLogger(name).addFilter(self._once)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Sends a batch, on the thread of its processor."""
        result = super().export(spans)
        if result is SpanExportResult.SUCCESS and self._once.said:
            self._once.said.clear()
            log.info("the collector takes spans again")
        return result


class _Once(logging.Filter):
    """Lets each complaint pass once, whatever its details, until `said` is cleared."""

    def __init__(self) -> None:
        super().__init__()
        self.said: set[tuple[object, ...]] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is new."""
        # What is exported, where to and the status code stand first; times and addresses of attempts follow.
        complaint = (record.msg, *(record.args[:3] if isinstance(record.args, tuple) else ()))
        is_new = complaint not in self.said
        self.said.add(complaint)
        return is_new
