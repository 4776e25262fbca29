"""The SDK's side of `otlp`: spans in batches to a collector. Imported only where an endpoint is named; needs the extra."""

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor


def export_as(attributes: dict[str, str]) -> TracerProvider:
    """From now on every span goes out; shut the provider down to send the last.

    Args:
        attributes: who the spans are of, e.g. "service.name".
    """
    provider = TracerProvider(resource=Resource.create(attributes))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    return provider
