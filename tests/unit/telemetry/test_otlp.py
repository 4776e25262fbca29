import sys

import pytest

from kvmesh.errors import BadConfig
from kvmesh.telemetry.otlp import ENDPOINTS, exporting


@pytest.mark.parametrize("name", ENDPOINTS)
def test_an_endpoint_without_the_extra_is_refused_with_both_cures(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setitem(sys.modules, "kvmesh.telemetry.collector", None)  # as an import of what is not installed
    with pytest.raises(BadConfig, match=rf"{name} is set.*kvmesh\[traces\].*unset"), exporting("gateway"):
        pass


def test_without_an_endpoint_the_sdk_is_not_even_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ENDPOINTS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(sys.modules, "kvmesh.telemetry.collector", None)
    with exporting("gateway"):
        pass
