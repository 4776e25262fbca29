import os
import sys
from types import SimpleNamespace

import pytest

from kvmesh.errors import BadConfig
from kvmesh.telemetry.otlp import ENDPOINTS, exporting


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize("name", ENDPOINTS)
def test_an_endpoint_without_the_extra_is_refused_with_both_cures(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setitem(sys.modules, "kvmesh.telemetry.collector", None)  # as an import of what is not installed
    with pytest.raises(BadConfig, match=rf"{name} is set.*kvmesh\[traces\].*unset"), exporting("gateway"):
        pass


def test_without_an_endpoint_the_sdk_is_not_even_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvmesh.telemetry.collector", None)
    with exporting("gateway"):
        pass


@pytest.mark.parametrize(
    ("name", "value"),
    [("OTEL_TRACES_EXPORTER", "none"), ("OTEL_TRACES_EXPORTER", "None "), ("OTEL_SDK_DISABLED", "true")],
)
def test_export_can_be_turned_off_beside_an_endpoint(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENDPOINTS[1], "http://127.0.0.1:9")
    monkeypatch.setitem(sys.modules, "kvmesh.telemetry.collector", None)
    monkeypatch.setenv(name, value)
    with exporting("gateway"):
        pass


@pytest.mark.parametrize(
    ("name", "value", "needed"),
    [
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "abc", "a number of seconds"),
        ("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "-1", "a number of seconds"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "nan", "a number of seconds"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "zstd", "gzip"),
        ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "5000", "OTEL_BSP_MAX_QUEUE_SIZE is 2048"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "100", "a batch must fit"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "x", "a whole number"),
        ("OTEL_BSP_SCHEDULE_DELAY", "0", "a whole number"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf", "grpc"),
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json", "grpc"),
        ("OTEL_TRACES_EXPORTER", "zipkin", "otlp or none"),
    ],
)
def test_a_variable_that_can_t_be_used_is_named(
    name: str, value: str, needed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENDPOINTS[1], "http://127.0.0.1:9")
    monkeypatch.setenv(name, value)
    with pytest.raises(BadConfig, match=rf"{name} is .*{needed}"), exporting("gateway"):
        pass


def test_what_the_sdk_itself_refuses_is_said_in_one_line_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(attributes: dict[str, str]) -> None:
        raise ValueError("must be a non-negative integer")

    monkeypatch.setenv(ENDPOINTS[1], "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_SPAN_EVENT_COUNT_LIMIT", "many")
    monkeypatch.setitem(sys.modules, "kvmesh.telemetry.collector", SimpleNamespace(export_as=refuses))  # type: ignore[arg-type]
    with pytest.raises(BadConfig, match=r"OTEL_SPAN_EVENT_COUNT_LIMIT.*non-negative"), exporting("gateway"):
        pass


def test_an_empty_service_name_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    named: list[dict[str, str]] = []

    def export_as(attributes: dict[str, str]) -> SimpleNamespace:
        named.append(attributes)
        return SimpleNamespace(shutdown=lambda: None)

    monkeypatch.setenv(ENDPOINTS[1], "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "")
    monkeypatch.setitem(sys.modules, "kvmesh.telemetry.collector", SimpleNamespace(export_as=export_as))  # type: ignore[arg-type]
    with exporting("gateway"):
        pass
    assert [n["service.name"] for n in named] == ["kvmesh-gateway"]
