"""`kvmesh size` as it is typed."""

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from kvmesh.cli.__main__ import main
from services.decode.config import DecodeSettings
from services.gateway.validation import DEFAULT_OUTPUT_TOKENS
from services.prefill.config import PrefillSettings

LOAD = "--prompt-tokens 500 --output-tokens 100"
RATES = "--prefill-rate 1000 --step 1:0.01 --step 11:0.02"


class Typed:
    """The command line, and what it says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def __call__(self, flags: str) -> tuple[int, str, str]:
        self._monkeypatch.setattr(sys, "argv", ["kvmesh", "size", *shlex.split(flags)])
        with pytest.raises(SystemExit) as ended:
            main()
        said = self._capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    def json(self, flags: str) -> dict[str, Any]:
        code, out, _ = self(f"{flags} --json")
        assert code == 0
        (line,) = out.splitlines()
        return json.loads(line)


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Typed:
    return Typed(monkeypatch, capsys)


def test_without_numbers_it_says_how_many_and_what_to_expect(typed: Typed) -> None:
    code, out, err = typed(f"--rate 3 {LOAD} {RATES} --kv-bytes-per-token 50000 --link-gb 1")
    assert (code, err) == (0, "")
    assert out.startswith("3 pipelines of 2 stages and 1 decoder at 3 requests/s\n")
    for words in (
        "95 % within 1,391",
        "first token, 95 % within",
        "KV into a decoder",
        "bears up to",
        "add a pipeline",
    ):
        assert words in out


def test_with_numbers_it_says_what_they_bear_and_how_they_fare(typed: Typed) -> None:
    there = f"{LOAD} {RATES} --pipelines 2 --decoders 1"
    most = typed.json(there)
    assert most["holds"]
    assert most["rate"] == most["highest_rate"]
    more = typed.json(f"{there} --rate {most['rate'] * 1.01}")
    assert not more["holds"]
    assert [g["name"] for g in more["gauges"] if not g["holds"]] == [g["name"] for g in most["full_first"]]
    code, out, _ = typed(f"{there} --rate 100")
    assert (code, out.splitlines()[0]) == (0, "2 pipelines of 2 stages and 1 decoder at 100 requests/s: too much")
    assert "∞" in out


def test_json_has_null_for_what_is_infinite_and_units_in_names(typed: Typed) -> None:
    found = typed.json(f"{LOAD} {RATES} --pipelines 1 --decoders 1 --rate 50")
    assert found["first_token_p95_seconds"] is None
    assert found["first_token_parts_seconds"]["prefill"] == pytest.approx(0.624, abs=1e-3)
    assert 0 < found["add_decoder_above_pages_ratio"] < 1
    assert found["measured"] == []


def test_memory_and_the_shape_of_the_model_make_pages(typed: Typed, tiny_model_dir: Path, tmp_path: Path) -> None:
    config = json.loads((tiny_model_dir / "config.json").read_text())
    heads = config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    token_bytes = config["num_hidden_layers"] * 2 * heads * head_dim * 2
    of_model = f"--kv-gib 0.001 --model {tiny_model_dir} --dtype bf16 --cache-dir {tmp_path}"
    lengths = "--prompt-tokens 50 --output-tokens 10 --max-output-tokens 20"
    found = typed.json(f"--rate 0.1 {lengths} {RATES} {of_model}")
    (pages,) = [g["limit"] for g in found["gauges"] if g["name"].startswith("pages of a decoder")]
    assert pages == int(0.001 * 2**30 / (token_bytes * 16))
    same = typed.json(f"--rate 0.1 {lengths} {RATES} --kv-gib 0.001 --kv-bytes-per-token {token_bytes}")
    assert same == found


def test_the_defaults_are_those_of_the_services(typed: Typed) -> None:
    found = typed.json(f"--rate 0.1 {LOAD} {RATES}")
    limits = {g["name"].partition(",")[0]: g["limit"] for g in found["gauges"]}
    prefill = PrefillSettings(bootstrap="x", model="x")
    decode = DecodeSettings(bootstrap="x", model="x")
    assert limits["pages of a stage"] == prefill.num_pages
    assert limits["pages of a decoder"] == decode.num_pages
    assert limits["rooms of a decoder"] == decode.max_running_rooms
    given = f"--step-tokens {prefill.step_tokens} --page-size {decode.page_size} --max-output-tokens {DEFAULT_OUTPUT_TOKENS}"
    assert typed.json(f"--rate 0.1 {LOAD} {RATES} {given}") == found


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("", "needed: --rate (requests a second), --prompt-tokens"),
        (f"{LOAD} --pipelines 1 --decoders 1", "needed: --prefill-rate"),
        (f"--rate -1 {LOAD} {RATES}", "argument --rate: '-1' is not a number above 0"),
        (f"--rate nan {LOAD} {RATES}", "argument --rate: 'nan' is not a number above 0"),
        (f"--rate 1 {LOAD} {RATES} --overhead -1", "argument --overhead: '-1' is not a number, 0 or more"),
        (f"--rate 1 {LOAD} {RATES} --pp 0", "argument --pp: '0' is not a whole number above 0"),
        (f"--rate 1 {LOAD} {RATES} --step 4", "argument --step: '4' is not ROOMS:SECONDS, such as 16:0.05"),
        (f"--rate 1 {LOAD} {RATES} --window 5", "argument --window: '5' is not a number of minutes"),
        (f"--rate 1 {LOAD} {RATES} --step 11:0.03", "--step is needed for two or more batches, each once"),
        (f"--rate 1 {LOAD} --prefill-rate 1 --step 1:1", "--step is needed for two or more batches"),
        (f"--rate 1 {LOAD} {RATES} --step 12:0.001", "--step: seconds must not fall while rooms rise"),
        (f"--rate 1 {LOAD} {RATES} --pipelines 1", "--pipelines and --decoders go together"),
        (f"--rate 1 {LOAD} {RATES} --prompt-p95 9000", "--prompt-p95 9000 is outside [500, 1934.07]"),
        (f"--rate 1 {LOAD} {RATES} --max-output-tokens 99", "--output-tokens is 100; 1 to --max-output-tokens (99)"),
        (f"--rate 1 {LOAD} {RATES} --num-pages 100", "--num-pages: 100 pages, and one room of 1391"),
        (f"--rate 1 {LOAD} {RATES} --prefill-pages 80", "--prefill-pages: 80 pages, and one room of 1391"),
        (f"--rate 1 {LOAD} {RATES} --first-token 1", "--first-token is 1: a mesh that is idle needs"),
        (f"--rate 1 {LOAD} {RATES} --token-gap 0.01", "--token-gap is 0.01: a mesh that is idle needs 0.01 s"),
        (f"--rate 1 {LOAD} {RATES} --kv-gib 1", "--kv-gib and --link-gb need --model or --kv-bytes-per-token"),
        (f"--rate 1 {LOAD} {RATES} --model x --kv-bytes-per-token 9", "--model and --kv-bytes-per-token say the same"),
        (f"--rate 1 {LOAD} {RATES} --kv-gib 1 --kv-bytes-per-token 9 --num-pages 9", "--num-pages and --kv-gib"),
        (f"--rate 1 {LOAD} {RATES} --model nowhere", "model 'nowhere' is neither"),
        (f"--rate 99999 {LOAD} {RATES}", "99999 requests a second need more than 1000 pipelines or decoders"),
        ("--prometheus file:///etc", "--prometheus is 'file:///etc'; something like http://127.0.0.1:9090"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_flag(typed: Typed, flags: str, says: str) -> None:
    code, out, err = typed(flags)
    assert (code, out) == (2, "")
    assert says in err.replace("\n", " ")


def test_more_than_the_model_has_positions_for_is_refused(typed: Typed, tiny_model_dir: Path) -> None:
    code, _, err = typed(f"--rate 1 --prompt-tokens 100000 --output-tokens 100 {RATES} --model {tiny_model_dir}")
    assert code == 2
    assert "--prompt-p95 and --max-output-tokens are" in err
    assert "positions" in err
