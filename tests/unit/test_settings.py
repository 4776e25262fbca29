import dataclasses
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvmesh.errors import BadConfig
from kvmesh.settings import KNOWN_FIELDS, load, load_or_exit, setting
from services.bootstrap.config import BootstrapSettings
from services.decode.config import DecodeSettings
from services.gateway.config import GatewaySettings
from services.prefill.config import PrefillSettings


@dataclass(frozen=True)
class Toy:
    bootstrap: str = setting(help="where the registry is")
    rank: int = setting(0, help="position, 0 … pp_size - 1")
    pp_size: int = setting(1, help="stages, 100 % of them")
    share: float = setting(0.5, help="a share")
    verbose: bool = setting(False, help="says more")
    cache_dir: Path = setting(Path("~/.cache/kvmesh"), help="a directory")
    limit: int | None = setting(None, help="none, or a number")

    def check(self) -> None:
        if self.rank >= self.pp_size:
            raise BadConfig(f"rank {self.rank} is outside [0, {self.pp_size}): pp_size is {self.pp_size}")


BOOTSTRAP = ["--bootstrap", "h:1"]


def test_defaults_hold_where_nothing_is_given() -> None:
    assert load(Toy, BOOTSTRAP, {}) == Toy(bootstrap="h:1", rank=0, pp_size=1, share=0.5, verbose=False, limit=None)


def test_every_kind_is_read_from_flags() -> None:
    flags = [
        *BOOTSTRAP,
        "--rank",
        "1",
        "--pp-size=2",
        "--share=-1e-3",
        "--verbose",
        "--cache-dir",
        "/x",
        "--limit",
        "3",
    ]
    assert load(Toy, flags, {}) == Toy("h:1", 1, 2, -0.001, True, Path("/x"), 3)


def test_every_kind_is_read_from_the_environment() -> None:
    environ = {
        "KVMESH_BOOTSTRAP": "h:1",
        "KVMESH_RANK": "1",
        "KVMESH_PP_SIZE": "2",
        "KVMESH_SHARE": "0.25",
        "KVMESH_VERBOSE": "Yes",
        "KVMESH_CACHE_DIR": "~/x",
        "KVMESH_LIMIT": "3",
    }
    assert load(Toy, [], environ) == Toy("h:1", 1, 2, 0.25, True, Path("~/x").expanduser(), 3)


def test_a_flag_wins_over_the_environment() -> None:
    assert (
        load(Toy, [*BOOTSTRAP, "--share", "1", "--verbose", "no"], {"KVMESH_SHARE": "2", "KVMESH_VERBOSE": "1"}).share
        == 1
    )


@pytest.mark.parametrize(
    ("flags", "environ", "message"),
    [
        (["--pp-sice", "2"], {}, "unknown flag --pp-sice; did you mean --pp-size?"),
        (["--pp-sice=2"], {}, "unknown flag --pp-sice=2; did you mean --pp-size?"),
        (["--pp", "2"], {}, "unknown flag --pp"),
        (["stray"], {}, "unknown flag stray"),
        (["--rank"], {}, "--rank"),
        (["--rank", "one"], {}, "--rank is 'one'; a whole number is needed"),
        (["--rank", "1.0"], {}, "--rank is '1.0'; a whole number is needed"),
        (["--share", "nan"], {}, "--share is 'nan'; a number is needed"),
        (["--share", "inf"], {}, "--share is 'inf'; a number is needed"),
        (["--verbose", "maybe"], {}, "--verbose is 'maybe'; true or false is needed"),
        (["--cache-dir", ""], {}, "--cache-dir is ''; a path is needed"),
        ([], {"KVMESH_RANK": ""}, "KVMESH_RANK is ''; a whole number is needed"),
        ([], {"KVMESH_PP_SISE": "2"}, "unknown variable KVMESH_PP_SISE; did you mean KVMESH_PP_SIZE?"),
        (["--rank", "2", "--pp-size", "2"], {}, "rank 2 is outside [0, 2): pp_size is 2"),
    ],
)
def test_what_is_unknown_malformed_or_contradicting_is_named(
    flags: list[str], environ: dict[str, str], message: str
) -> None:
    with pytest.raises(BadConfig) as raised:
        load(Toy, [*BOOTSTRAP, *flags], environ)
    assert message in str(raised.value)


def test_a_setting_that_is_needed_is_asked_for_by_both_names() -> None:
    with pytest.raises(BadConfig, match=r"^bootstrap is needed: give --bootstrap or KVMESH_BOOTSTRAP$"):
        load(Toy, [], {})


def test_a_variable_of_another_service_is_left_alone() -> None:
    assert (
        load(
            Toy, BOOTSTRAP, {"KVMESH_STATE_DIR": "/x", "KVMESH_NUM_PAGES": "x", "KVMESH_GATEWAY": "h:2", "OTHER": "x"}
        ).rank
        == 0
    )


@pytest.mark.parametrize(
    "variable",
    [
        "KVMESH_GATEWAY_SERVICE_HOST",
        "KVMESH_GATEWAY_SERVICE_PORT",
        "KVMESH_GATEWAY_SERVICE_PORT_GRPC",
        "KVMESH_BOOTSTRAP_PORT",
        "KVMESH_BOOTSTRAP_PORT_7000_TCP",
        "KVMESH_BOOTSTRAP_PORT_7000_TCP_ADDR",
        "KVMESH_BOOTSTRAP_PORT_7000_TCP_PROTO",
    ],
)
def test_what_kubernetes_says_of_a_service_called_kvmesh_is_no_setting(variable: str) -> None:
    assert load(Toy, BOOTSTRAP, {variable: "tcp://10.0.0.1:7000"}).rank == 0


def test_help_tells_every_flag_its_variable_and_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        load(Toy, ["--help"], {}, program="toy")
    text = " ".join(capsys.readouterr().out.split())
    assert raised.value.code == 0
    for field in dataclasses.fields(Toy):
        assert f"--{field.name.replace('_', '-')}" in text
        assert f"KVMESH_{field.name.upper()}" in text
    assert "stages, 100 % of them [KVMESH_PP_SIZE; default 1]" in text
    assert "[KVMESH_BOOTSTRAP; needed]" in text


def test_bad_configuration_is_one_line_and_exit_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["toy", "--rank", "x"])
    monkeypatch.setenv("KVMESH_BOOTSTRAP", "h:1")
    with pytest.raises(SystemExit) as raised:
        load_or_exit(Toy)
    assert raised.value.code == 2
    assert capsys.readouterr().err == "--rank is 'x'; a whole number is needed\n"


def test_settings_can_not_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        load(Toy, BOOTSTRAP, {}).rank = 1  # type: ignore[misc]


def test_the_names_known_are_those_of_the_services() -> None:
    services = (BootstrapSettings, PrefillSettings, DecodeSettings, GatewaySettings)
    assert {f.name for s in services for f in dataclasses.fields(s)} == KNOWN_FIELDS


@pytest.mark.parametrize(
    "service", [BootstrapSettings, PrefillSettings, DecodeSettings, GatewaySettings], ids=lambda s: s.__name__
)
def test_every_setting_of_every_service_has_its_help(service: type) -> None:
    assert all(f.metadata.get("help") for f in dataclasses.fields(service))


@pytest.mark.parametrize(
    "service", [BootstrapSettings, PrefillSettings, DecodeSettings, GatewaySettings], ids=lambda s: s.__name__
)
def test_no_service_has_a_port_of_its_own_by_default(service: type) -> None:
    """F-N7: two of a kind start on one host; each takes free ports and announces them."""
    defaults = {f.name: f.default for f in dataclasses.fields(service) if f.name.endswith("listen")}
    assert set(defaults) >= {"listen", "health_listen", "metrics_listen"}
    assert all(str(address).endswith(":0") for address in defaults.values()), defaults


NEEDED = {
    BootstrapSettings: ["--state-dir", "/x"],
    PrefillSettings: [*BOOTSTRAP, "--model", "m"],
    DecodeSettings: [*BOOTSTRAP, "--model", "m"],
    GatewaySettings: [*BOOTSTRAP, "--model", "m"],
}
SERVICES = pytest.mark.parametrize("service", NEEDED, ids=lambda s: s.__name__)


@SERVICES
def test_a_grace_in_which_no_drain_fits_is_refused_with_both_values(service: type) -> None:
    with pytest.raises(BadConfig, match="grace_seconds is 24 and drain_seconds is 20"):
        load(service, [*NEEDED[service], "--grace-seconds", "24"], {}).check_serving()
    load(service, [*NEEDED[service], "--grace-seconds", "25"], {}).check_serving()


@SERVICES
def test_without_a_known_grace_any_drain_will_do(service: type) -> None:
    load(service, [*NEEDED[service], "--drain-seconds", "9000"], {}).check_serving()


@pytest.mark.parametrize("service", [BootstrapSettings, PrefillSettings, DecodeSettings], ids=lambda s: s.__name__)
@pytest.mark.parametrize("heartbeat", ["2", "3"])
def test_a_heartbeat_as_long_as_the_lease_is_refused_with_both_values(service: type, heartbeat: str) -> None:
    with pytest.raises(BadConfig, match=f"heartbeat_seconds is {heartbeat} and lease_seconds is 2"):
        load(service, [*NEEDED[service], "--heartbeat-seconds", heartbeat, "--lease-seconds", "2"], {})
