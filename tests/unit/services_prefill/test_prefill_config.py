import pytest

from kvmesh.errors import BadConfig
from kvmesh.settings import load
from services.decode.config import DecodeSettings
from services.prefill.config import PrefillSettings

NEEDED = ["--bootstrap", "127.0.0.1:1", "--model", "m"]


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (["--rank", "2", "--pp-size", "2"], ["rank 2", "pp_size is 2"]),
        (["--rank", "-1"], ["rank -1"]),
        (["--dtype", "int8"], ["dtype", "fp32"]),
        (["--threads", "0"], ["threads is 0"]),
        (["--num-pages", "0"], ["num_pages is 0"]),
        (["--page-size", "0"], ["page_size is 0"]),
        (["--step-tokens", "0"], ["step_tokens is 0"]),
        (["--max-tokens", "-1"], ["max_tokens is -1"]),
        (["--heartbeat-seconds", "0"], ["heartbeat_seconds is 0"]),
        (["--heartbeat-seconds", "20"], ["heartbeat_seconds is 20", "watchdog_seconds is 2"]),
        (["--pp-size", "2", "--replicas", "3"], ["replicas is 3", "pp_size is 2"]),
        (["--tls-cert", "a", "--tls-key", "b"], ["tls_cert and tls_key without tls_ca"]),
    ],
)
def test_a_bad_value_of_a_stage_is_named_with_what_is_needed(flags: list[str], names: list[str]) -> None:
    with pytest.raises(BadConfig) as caught:
        load(PrefillSettings, [*NEEDED, *flags], {})
    assert all(name in str(caught.value) for name in names)


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (["--dtype", "int8"], ["dtype"]),
        (["--max-running-rooms", "0"], ["max_running_rooms is 0"]),
        (["--window-mib", "0"], ["window_mib is 0"]),
        (["--window-mib", "4096"], ["window_mib is 4096", "at most 2048"]),
        (["--shared-mib", "2"], ["shared_mib is 2", "4 to"]),
        (["--tls-ca", "a"], ["tls_ca without tls_cert and tls_key"]),
        (["--tls-name", "stages.kvmesh"], ["tls_name without tls_cert and tls_key and tls_ca"]),
    ],
)
def test_a_bad_value_of_a_decoder_is_named(flags: list[str], names: list[str]) -> None:
    with pytest.raises(BadConfig) as caught:
        load(DecodeSettings, [*NEEDED, *flags], {})
    assert all(name in str(caught.value) for name in names)


def test_replicas_that_are_not_known_fit_any_pipeline() -> None:
    assert load(PrefillSettings, [*NEEDED, "--pp-size", "3"], {}).replicas == 0
    assert load(PrefillSettings, [*NEEDED, "--pp-size", "3", "--replicas", "3"], {}).replicas == 3


@pytest.mark.parametrize("layers", ["0:99", "3", "a:b", "5:5", "7:3", ":", "-1:3"])
def test_layers_outside_the_model_are_refused(layers: str) -> None:
    settings = load(PrefillSettings, [*NEEDED, f"--layers={layers}"], {})
    with pytest.raises(BadConfig, match="layers"):
        settings.layer_range(30)


@pytest.mark.parametrize(("pp_size", "num_layers"), [(1, 30), (2, 30), (3, 31), (7, 30), (30, 30)])
def test_even_shares_tile_the_model(pp_size: int, num_layers: int) -> None:
    ends = 0
    for rank in range(pp_size):
        settings = load(PrefillSettings, [*NEEDED, "--rank", str(rank), "--pp-size", str(pp_size)], {})
        begin, end = settings.layer_range(num_layers)
        assert begin == ends < end
        ends = end
    assert ends == num_layers


def test_more_stages_than_layers_are_refused() -> None:
    settings = load(PrefillSettings, [*NEEDED, "--rank", "0", "--pp-size", "4"], {})
    with pytest.raises(BadConfig, match="pp_size is 4"):
        settings.layer_range(3)
