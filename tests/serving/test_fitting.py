"""`prfaas profile`: logs of a known deployment give it back; what they cannot tell is said."""

from __future__ import annotations

import asyncio
import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
import yaml
from typer.testing import CliRunner

from prfaas_env.base import PrfaasError
from prfaas_env.policy import make_policy
from prfaas_env.profiles.catalogue import CatalogueEntry
from prfaas_env.profiles.latency import DecodeProfile, PrefillPolynomial
from prfaas_env.scenarios import Scenario, load_scenario
from prfaas_env.simulator.formulas import NEVER_NS
from prfaas_env.simulator.run import simulate
from prfaas_serving.decision_log import LegTimes, read_log
from prfaas_serving.fitting import fit_deployment, write_fitted
from prfaas_serving.measured import of_log, of_table, read_measured
from prfaas_serving.profile_command import profile
from tests.serving.log_producer import produce, request, tiny_header, write
from tests.serving.support import run, serving

SCENARIO = """
extends: paper
name: known
model:
  name: known
  kv: {fixed_bytes: 200000, bytes_per_token: 900, n_layers: 4}
  kv_source: test
  hardware:
    near:
      prefill: {kind: polynomial, c0_s: 0.05, c1_s_per_token: 1.0e-4, c2_s_per_token2: 4.0e-9, source: test}
      decode: {a_s: 0.02, b_s_per_sequence: 0.002, slots: 20, source: test}
    far:
      prefill: {kind: polynomial, c0_s: 0.02, c1_s_per_token: 4.0e-5, c2_s_per_token2: 1.0e-9, source: test}
deployment:
  prfaas: [{name: prfaas0, hardware: far, n_instances: 1}]
  pd: [{name: pd0, hardware: near, n_prefill: 1, n_decode: 1, rdma_bps: 1 Gbps, rdma_latency_s: 0.004}]
  links: [{prfaas: prfaas0, pd: pd0, capacity_bps: 200 Mbps, latency_s: 0.03}]
transport: {pipelining: false}
workload:
  arrivals: {kind: poisson, rate_rps: 1.0}
  input_tokens: {kind: lognormal, mu: 8.0, sigma: 0.9, min_tokens: 128, max_tokens: 30000}
  output_tokens: {kind: poisson, mean_tokens: 40}
slo: {ttft_s: 4, tpot_s: 0.1}
measure: {horizon_s: 400}
"""


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> tuple[Scenario, Path]:
    """A scenario and the log of one threshold in it."""
    folder = tmp_path_factory.mktemp("known")
    (folder / "known.yaml").write_text(SCENARIO, encoding="utf-8")
    scenario = load_scenario(folder / "known.yaml")
    produce(folder / "router.log", scenario, "static:threshold_tokens=3000", seed=3)
    return scenario, folder / "router.log"


def mean_ttft_s(scenario: Scenario, spec: str) -> float:
    episode = simulate(scenario, make_policy(spec), seed=77, n_requests=400)
    seen = episode.records.first_token_ns < NEVER_NS
    return float((episode.records.first_token_ns - episode.world.requests.arrival_ns)[seen].mean() / 1e9)


def test_a_log_gives_the_deployment_back(known: tuple[Scenario, Path]) -> None:
    scenario, log = known
    fitted = fit_deployment(of_log(read_log(log)))
    for name in ("near", "far"):
        grid = np.geomspace(300, 20_000, 20)
        np.testing.assert_allclose(
            fitted.model.hardware[name].prefill.seconds_array(grid),
            scenario.model.hardware[name].prefill.seconds_array(grid),
            rtol=0.01,
        )
    decode = fitted.model.hardware["near"].decode
    assert decode is not None
    assert decode.a_s + 2 * decode.b_s_per_sequence == pytest.approx(0.024, rel=0.02)
    assert fitted.model.kv == scenario.model.kv
    link, pd = fitted.scenario.deployment.links[0], fitted.scenario.deployment.pd[0]
    assert link.capacity_bps == pytest.approx(200e6, rel=0.02)
    assert link.latency_s == pytest.approx(0.03, rel=0.1)
    assert pd.rdma_latency_s == pytest.approx(0.004, abs=0.002)
    assert fitted.left_out == {}


def test_other_thresholds_are_predicted_from_one(known: tuple[Scenario, Path]) -> None:
    """The whole path: a log of one threshold, and the means of others on arrivals that it has not."""
    scenario, log = known
    fitted = fit_deployment(of_log(read_log(log))).scenario
    for spec in ("never", "static:threshold_tokens=1500", "static:threshold_tokens=6000", "always"):
        assert mean_ttft_s(fitted, spec) == pytest.approx(mean_ttft_s(scenario, spec), rel=0.03), spec


def test_what_is_written_can_be_played(known: tuple[Scenario, Path], tmp_path: Path) -> None:
    fitted = fit_deployment(of_log(read_log(known[1])), name="mine")
    write_fitted(fitted, tmp_path / "out")
    entry = CatalogueEntry.model_validate(
        yaml.safe_load((tmp_path / "out" / "profile.yaml").read_text(encoding="utf-8"))
    )
    assert entry.profile().hardware == fitted.model.hardware
    (tmp_path / "out").rename(tmp_path / "moved")
    scenario = load_scenario(tmp_path / "moved" / "scenario.yaml")
    assert (scenario.name, scenario.model) == ("mine", fitted.model)
    episode = simulate(scenario, make_policy("static:threshold_tokens=3000"), seed=0, whole_trace=True)
    recorded = of_log(read_log(known[1]))
    assert len(episode.world.requests) == len(recorded)
    measured = recorded.ttft_s.mean()
    records = episode.records
    again = (records.first_token_ns - episode.world.requests.arrival_ns).mean() / 1e9
    assert again == pytest.approx(measured, rel=0.02)


# --------------------------------------------------------------------------- request logs


def table_rows(log: Path, columns: tuple[str, ...]) -> list[dict[str, Any]]:
    """The log as somebody else's router would have written it."""
    measured = of_log(read_log(log))
    rows = []
    for k in range(len(measured)):
        step_s = 0.02 + 0.002 * measured.batch[k]
        row = {
            "arrival_s": measured.arrival_s[k] + 1.7e9,
            "input_tokens": int(measured.input_tokens[k]),
            "output_tokens": int(measured.output_tokens[k]),
            "ttft_s": measured.ttft_s[k],
            "tpot_s": measured.tpot_s[k] if measured.tpot_s[k] == measured.tpot_s[k] else "",
            "path": "remote" if measured.remote[k] else "local",
            "prefill_s": measured.prefill_s[k],
            "transferred_bytes": measured.n_bytes[k] if measured.remote[k] else "",
            "transfer_s": max(measured.handover_s[k] - step_s, 1e-4),
        }
        rows.append({name: row[name] for name in columns})
    return rows


ALL = (
    "arrival_s",
    "input_tokens",
    "output_tokens",
    "ttft_s",
    "tpot_s",
    "path",
    "prefill_s",
    "transferred_bytes",
    "transfer_s",
)


def as_csv(path: Path, rows: list[dict[str, Any]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


@pytest.mark.parametrize("without", [(), ("prefill_s",)], ids=["prefill_s", "idle_paths"])
@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_a_request_log_gives_the_deployment_back(
    known: tuple[Scenario, Path], tmp_path: Path, form: str, without: tuple[str, ...]
) -> None:
    """With prefill times as they are, or only first-token times: then those on an idle path count."""
    scenario, log = known
    rows = table_rows(log, tuple(name for name in ALL if name not in without))
    path = tmp_path / f"requests.{form}"
    if form == "csv":
        as_csv(path, rows)
    else:
        keep = [{k: v for k, v in row.items() if v != ""} for row in rows]
        path.write_text("".join(json.dumps(row) + "\n" for row in keep), encoding="utf-8")
    fitted = fit_deployment(read_measured(str(path)), scenario)
    for name, low, high in (("near", 300, 3000), ("far", 3000, 15_000)):
        grid = np.geomspace(low, high, 10)
        np.testing.assert_allclose(
            fitted.model.hardware[name].prefill.seconds_array(grid),
            scenario.model.hardware[name].prefill.seconds_array(grid),
            rtol=0.03,
        )
    assert fitted.scenario.deployment.links[0].capacity_bps == pytest.approx(200e6, rel=0.03)
    assert fitted.model.kv == scenario.model.kv
    idle, every = fitted.qualities["prefill near"].points, int((~of_log(read_log(log)).remote).sum())
    assert idle == every if not without else 0.2 * every < idle < every


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("ttft_s\n1\n", "no column input_tokens"),
        ("input_tokens,ttft_s\n", "holds no request"),
        ("input_tokens,ttft_s\n10,x\n", r"requests.csv:2: ttft_s must be a number, found 'x'"),
        ("input_tokens,ttft_s\n10,-1\n", r":2: ttft_s must be within 0"),
        ("input_tokens,ttft_s,path\n10,1,east\n", "path must be local or remote, found 'east'"),
        ("input_tokens,ttft_s\n10,1,2\n", "more fields than columns"),
        ("input_tokens,ttft_s\n10,1\n", "nothing says which requests found an idle worker"),
        ("input_tokens,ttft_s\n,\n", "no request has both"),
    ],
)
def test_faults_of_a_request_log_are_named(tmp_path: Path, rows: str, message: str) -> None:
    path = tmp_path / "requests.csv"
    path.write_text(rows, encoding="utf-8")
    with pytest.raises(PrfaasError, match=message):
        of_table(path)


def test_a_table_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    table = tmp_path / "requests.csv"
    table.write_text("input_tokens,ttft_s,prefill_s\n10,1,0.5\n", encoding="utf-8-sig")
    lines = tmp_path / "requests.jsonl"
    lines.write_text('{"input_tokens": 10, "ttft_s": 1, "prefill_s": 0.5}\n', encoding="utf-8-sig")
    for path in (table, lines):
        measured = of_table(path)
        assert (measured.input_tokens.tolist(), measured.prefill_s.tolist()) == ([10], [0.5])


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b'{"input_tokens": 10}\n[1]\n', "requests.jsonl:2: not a JSON object, found list"),
        (b'{"input_tokens": 10}\n\n{"a\n', "requests.jsonl:3: not a JSON object on one line"),
        (b"\xff\xfe{\n", "requests.jsonl: not a text file in UTF-8"),
    ],
)
def test_faults_of_json_lines_are_named(tmp_path: Path, raw: bytes, message: str) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_bytes(raw)
    with pytest.raises(PrfaasError, match=message):
        of_table(path)


def test_too_little_data_says_what_and_why(known: tuple[Scenario, Path], tmp_path: Path) -> None:
    rows = table_rows(known[1], ALL)
    local = as_csv(tmp_path / "local.csv", [row for row in rows if row["path"] == "local"])
    with pytest.raises(PrfaasError, match=r"prefill on far \(prfaas0\): 0 usable points, at least 8"):
        fit_deployment(of_table(local), known[0])
    few = as_csv(tmp_path / "few.csv", rows[:6])
    with pytest.raises(PrfaasError, match="usable points, at least 8 are needed"):
        fit_deployment(of_table(few), known[0])
    with pytest.raises(PrfaasError, match="does not say what it ran on: --scenario"):
        fit_deployment(of_table(local))
    with pytest.raises(PrfaasError, match="2 PD clusters; a profile is fitted to one"):
        fit_deployment(of_table(local), load_scenario("two_regions"))


def test_a_link_that_was_never_alone_is_not_guessed(known: tuple[Scenario, Path], tmp_path: Path) -> None:
    rows = [{**row, "transfers": 2} for row in table_rows(known[1], ALL)]
    path = as_csv(tmp_path / "shared.csv", rows)
    with pytest.raises(PrfaasError, match=r"link from prfaas0, transfers that had it alone: 0 usable"):
        fit_deployment(of_table(path), known[0])


# --------------------------------------------------------------------------- decision logs by hand


def test_a_log_of_an_earlier_version_is_refused(tmp_path: Path) -> None:
    log = write(tmp_path / "old.log", tiny_header(), [request(1.0), request(2.0)])
    with pytest.raises(PrfaasError, match="have no `legs`"):
        of_log(log)


def test_only_prefills_alone_at_their_worker_count(tmp_path: Path) -> None:
    """By hand: one behind another, one at its second try, one aborted, and the time from turn to sending."""

    def legs(sent_s: float, end_s: float, **changes: Any) -> dict[str, Any]:
        found = {
            "attempts": 1,
            "prefill_cluster": "pd0",
            "prefill_worker": "p",
            "prefill_sent_ns": round(sent_s * 1e9),
            "prefill_ahead": 0,
            "prefill_end_ns": round(end_s * 1e9),
            "decode_worker": "d",
            "decode_sent_ns": round(end_s * 1e9),
        }
        return {**found, **changes}

    lines = [
        request(1.0, ttft_s=0.6, end_ns=2_000_000_000, legs=LegTimes(**legs(1.01, 1.5))),
        # waits for the first one: its turn is at 1.5
        request(1.2, ttft_s=1.0, end_ns=3_000_000_000, legs=LegTimes(**legs(1.53, 2.03))),
        request(4.0, ttft_s=1.0, end_ns=5_500_000_000, legs=LegTimes(**legs(4.0, 4.8, prefill_ahead=1))),
        request(6.0, ttft_s=1.0, end_ns=7_500_000_000, legs=LegTimes(**legs(6.0, 6.8, attempts=2))),
        request(8.0, ttft_s=None, outcome="aborted", legs=LegTimes(**legs(8.0, 8.8))),
    ]
    measured = of_log(write(tmp_path / "router.log", tiny_header(), lines))
    # gaps 10 and 30 ms: 20 ms belong to each prefill
    np.testing.assert_allclose(measured.prefill_s, [0.51, 0.52, np.nan])
    np.testing.assert_allclose(measured.handover_s, [0.1, 0.17, 0.2], atol=1e-9)
    # the first decodes from 1.6 to 2.0 alone, the second from 2.2 to 3.0
    np.testing.assert_allclose(measured.batch, [1.0, 1.0, 1.0])
    np.testing.assert_array_equal(measured.cached_tokens, [1000.0] * 3)
    assert measured.left_out == {
        "took more than one try": 1,
        "did not finish": 1,
        "prefill: behind another one at its worker": 1,
    }


def test_transfers_that_share_the_link_are_told(tmp_path: Path) -> None:
    """Two overlap, one has the link alone; a local hand-over meanwhile does not matter."""
    lines = []
    for sent_s, first_s, cluster in (
        (1.0, 3.0, "prfaas0"),
        (2.5, 4.0, "prfaas0"),
        (5.0, 6.0, "prfaas0"),
        (5.2, 5.5, "pd0"),
    ):
        legs = LegTimes(
            attempts=1,
            prefill_cluster=cluster,
            prefill_worker=cluster,
            prefill_sent_ns=round((sent_s - 0.5) * 1e9),
            prefill_ahead=0,
            prefill_end_ns=round(sent_s * 1e9),
            decode_worker="d",
            decode_sent_ns=round(sent_s * 1e9),
        )
        lines.append(
            request(sent_s - 0.5, ttft_s=first_s - sent_s + 0.5, end_ns=round(first_s * 1e9), legs=legs)
        )
    measured = of_log(write(tmp_path / "router.log", tiny_header(), lines))
    assert measured.alone.tolist() == [False, False, True, False]
    assert measured.remote.tolist() == [True, True, True, False]


# --------------------------------------------------------------------------- a router that runs


def test_a_running_router_is_read_through_its_admin_port(tmp_path: Path) -> None:
    """Real times of fake workers behind a real router: the prefill law and the decode step come back."""

    async def work() -> None:
        law = PrefillPolynomial(c0_s=0.02, c1_s_per_token=2e-5, source="test")
        step = DecodeProfile(a_s=0.004, slots=8, source="test")
        async with serving(
            "vllm_nixl",
            spec={"prefill": law, "decode": step},
            limits={"prefill_per_worker": 1},
            threshold=2000.0,
            control={"policy": "never", "mode": "off"},
        ) as s:
            for k in range(40):
                await s.complete(list(range(k, k + 400 + 90 * k)), 8)
            address = f"http://127.0.0.1:{s.router.admin_port}"
            measured = await asyncio.to_thread(read_measured, address, "PRFAAS_TEST_TOKEN")
            with pytest.raises(PrfaasError, match="/requests: status 401; --token-env"):
                await asyncio.to_thread(read_measured, address)
        assert len(measured) == 40
        assert 10 < measured.remote.sum() < 30
        np.testing.assert_array_less(law.seconds_array(measured.input_tokens), measured.prefill_s + 1e-3)
        assert np.isfinite(measured.handover_s).all()
        assert np.isfinite(measured.tpot_s).all()
        assert measured.alone[measured.remote].all(), "one at a time"

    run(work)


def test_an_address_without_a_router_is_named() -> None:
    with pytest.raises(PrfaasError, match=r"http://127.0.0.1:9/requests: "):
        read_measured("http://127.0.0.1:9")
    with pytest.raises(PrfaasError, match="NOT_SET_ANYWHERE: the variable is not set"):
        read_measured("http://127.0.0.1:9", "NOT_SET_ANYWHERE")


# --------------------------------------------------------------------------- the command


def test_the_command_says_what_it_used(known: tuple[Scenario, Path], tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(profile)
    out = tmp_path / "out"
    result = CliRunner().invoke(app, ["--from", str(known[1]), "--out", str(out), "--name", "mine"])
    assert result.exit_code == 0, result.output
    for text in ("requests used", "prefill near", "link prfaas0", "goodput_bps prfaas0: ", "scenario.yaml"):
        assert text in result.output
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert set(report["fits"]) >= {"prefill near", "prefill far", "decode step", "KV bytes", "link prfaas0"}
    result = CliRunner().invoke(app, ["--from", str(tmp_path / "none.log"), "--out", str(out)])
    assert isinstance(result.exception, PrfaasError)
    assert "no such file" in str(result.exception)
