"""A latency profile and a scenario fitted to measured requests."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from pydantic import ValidationError

from prfaas_env.base import PrfaasError, first_error, write_whole
from prfaas_env.profiles.catalogue import CatalogueEntry, ModelProfile
from prfaas_env.profiles.fit import (
    MIN_POINTS,
    FitQuality,
    fit_bytes,
    fit_prefill,
    fit_step,
    fit_transfer,
)
from prfaas_env.profiles.kv import KVLayout
from prfaas_env.profiles.latency import DecodeProfile, HardwareProfile
from prfaas_env.scenarios import Scenario
from prfaas_env.scenarios.loader import scenario_yaml
from prfaas_env.scenarios.models import ConstantCapacity, Deployment, Link, PdCluster, PrfaasCluster
from prfaas_env.simulator.formulas import FloatArray, decode_step_s
from prfaas_env.workload.models import TraceWorkload
from prfaas_serving.measured import Measured

#: A hand-over takes this long at least; what the subtracted decode step leaves below is noise.
_MIN_HANDOVER_S = 1e-4
#: Least rate that a hand-over inside a cluster may have in a scenario, bit/s.
_MIN_RDMA_BPS = 1e6


@dataclass(frozen=True)
class Fitted:
    """What came out of a fit."""

    model: ModelProfile
    scenario: Scenario
    """The deployment with the fitted figures; its workload is that of the base."""
    trace: str | None
    """The measured requests as a trace (CSV of format burstgpt), if their arrivals are known."""
    qualities: dict[str, FitQuality]
    """By what was fitted."""
    figures: dict[str, float]
    left_out: dict[str, int]
    notes: tuple[str, ...]
    where: str
    n: int
    """Requests used."""

    def as_json(self) -> dict[str, Any]:
        """The report."""
        return {
            "from": self.where,
            "requests": self.n,
            "left_out": self.left_out,
            "fits": {name: quality.as_json() for name, quality in self.qualities.items()},
            "figures": self.figures,
            "notes": list(self.notes),
        }


class _Fitter:
    def __init__(self, measured: Measured, base: Scenario, name: str) -> None:
        deployment = base.deployment
        if len(deployment.pd) != 1:
            raise PrfaasError(
                f"scenario {base.name}: {len(deployment.pd)} PD clusters; a profile is fitted to one at a time"
            )
        self.m, self.base, self.name = measured, base, name
        self.pd = deployment.pd[0]
        self.qualities: dict[str, FitQuality] = {}
        self.figures: dict[str, float] = {}
        self.notes = list(measured.notes)
        self.cluster = self._clusters()

    def _clusters(self) -> Any:
        """Name of the cluster that prefilled each request, as the scenario calls it."""
        m, prfaas = self.m, self.base.deployment.prfaas
        if m.scenario is not None:
            return m.cluster
        if m.remote.any() and len(prfaas) != 1:
            raise PrfaasError(
                f"{m.where}: path is remote, and scenario {self.base.name} has {len(prfaas)} PrfaaS clusters; "
                "a request log tells one from the local side only"
            )
        return np.where(m.remote, prfaas[0].name if prfaas else "", self.pd.name)

    # -------------------------------------------------------------------- prefill, decode, bytes

    def _prefills(self) -> dict[str, HardwareProfile]:
        """Every kind of hardware with its fitted prefill; clusters of one kind are fitted together."""
        users: dict[str, list[str]] = {}
        clusters_of: list[PrfaasCluster | PdCluster] = [*self.base.deployment.prfaas, self.pd]
        for cluster in clusters_of:
            users.setdefault(cluster.hardware, []).append(cluster.name)
        out = {}
        for hardware, clusters in users.items():
            of = np.isin(self.cluster, clusters) & np.isfinite(self.m.prefill_s)
            if of.sum() < MIN_POINTS:
                raise PrfaasError(
                    f"{self.m.where}: prefill on {hardware} ({', '.join(clusters)}): {int(of.sum())} usable points, at "
                    f"least {MIN_POINTS} are needed{self._why()}; clusters of one kind of machine may share one "
                    "hardware in the scenario"
                )
            try:
                new = self.m.input_tokens[of] - self.m.cached_tokens[of]
                profile, quality = fit_prefill(new, self.m.cached_tokens[of], self.m.prefill_s[of])
            except PrfaasError as error:
                raise PrfaasError(
                    f"{self.m.where}: {hardware} ({', '.join(clusters)}): {error}{self._why()}"
                ) from None
            self.qualities[f"prefill {hardware}"] = quality
            out[hardware] = HardwareProfile(gpus=self.base.model.hardware[hardware].gpus, prefill=profile)
        return out

    def _why(self) -> str:
        """What was left out, for an error."""
        reasons = [f"{reason} {n}" for reason, n in self.m.left_out.items() if n]
        return f" (left out: {', '.join(reasons)})" if reasons else ""

    def _decode(self) -> DecodeProfile:
        m, old = self.m, self.base.hardware_of(self.pd).decode
        assert old is not None  # a scenario refuses a PD cluster without one
        of = np.isfinite(m.tpot_s) & (m.tpot_s > 0.0) & np.isfinite(m.batch)
        try:
            profile, quality = fit_step(m.batch[of], m.tpot_s[of], old.slots)
        except PrfaasError as error:
            raise PrfaasError(
                f"{m.where}: {error}; answers need tpot_s and more than one output token"
            ) from None
        self.qualities["decode step"] = quality
        limits = {
            "kv_capacity_tokens": old.kv_capacity_tokens,
            "kv_reserve_tokens": old.kv_reserve_tokens,
        }
        return DecodeProfile.model_validate({**profile.model_dump(), **limits})

    def _bytes(self) -> tuple[KVLayout, str]:
        m, old = self.m, self.base.model.kv
        of = np.isfinite(m.n_bytes) & (m.n_bytes > 0.0)
        if of.sum() < MIN_POINTS:
            self.notes.append("KV bytes are the scenario's: the log has no measured ones")
            return old, self.base.model.kv_source
        try:
            layout, quality = fit_bytes(m.input_tokens[of], m.n_bytes[of], old.n_layers)
        except PrfaasError as error:
            raise PrfaasError(f"{m.where}: {error}") from None
        self.qualities["KV bytes"] = quality
        return layout, f"Fitted to the bytes of {quality.points} transfers; layers as configured."

    # -------------------------------------------------------------------- hand-over

    def _handovers(self, of: Any, kv: KVLayout, decode: DecodeProfile) -> tuple[FloatArray, FloatArray]:
        """(bytes, seconds) of hand-overs without the first decode step."""
        m = self.m
        n_bytes = np.where(
            np.isfinite(m.n_bytes), m.n_bytes, kv.transfer_bytes_array(m.input_tokens.astype(np.int64))
        )[of]
        seconds = m.handover_s[of]
        if m.with_step:
            batch = np.where(np.isfinite(m.batch[of]), m.batch[of], 1.0)
            seconds = seconds - decode_step_s(decode.a_s, decode.b_s_per_sequence, 0.0, batch, 0)  # type: ignore[arg-type]
        return n_bytes, np.maximum(seconds, _MIN_HANDOVER_S)

    def _link(self, link: Link, kv: KVLayout, decode: DecodeProfile) -> Link:
        m = self.m
        over = self.cluster == link.prfaas
        if not over.any():
            self.notes.append(f"link from {link.prfaas}: as configured, nothing went over it")
            return link
        of = over & m.alone & np.isfinite(m.handover_s)
        try:
            rate_bps, fixed_s, quality = fit_transfer(
                *self._handovers(of, kv, decode), f"link from {link.prfaas}, transfers that had it alone"
            )
        except PrfaasError as error:
            shared = int((over & ~m.alone).sum())
            raise PrfaasError(f"{m.where}: {error} ({shared} shared it, or have no known time)") from None
        self.qualities[f"link {link.prfaas}"] = quality
        self.figures[f"goodput_bps {link.prfaas}"] = rate_bps
        self.figures[f"transfer_overhead_s {link.prfaas}"] = fixed_s
        # the time per transfer that was measured holds any window, set-up and jitter already
        return Link(prfaas=link.prfaas, pd=link.pd, capacity_bps=rate_bps, latency_s=fixed_s)

    def _local(self, kv: KVLayout, decode: DecodeProfile) -> PdCluster:
        m = self.m
        of = (self.cluster == self.pd.name) & np.isfinite(m.handover_s)
        if of.sum() < MIN_POINTS:
            self.notes.append(
                "the hand-over inside the PD cluster is the scenario's: the log does not tell it"
            )
            return self.pd
        n_bytes, seconds = self._handovers(of, kv, decode)
        try:
            rate_bps, fixed_s, quality = fit_transfer(n_bytes, seconds, "local hand-over")
        except PrfaasError:  # sizes that hardly differ: all of it is fixed
            rate_bps, fixed_s = self.pd.rdma_bps, float(np.median(seconds))
        else:
            self.qualities["local hand-over"] = quality
        self.figures["local_handover_s"] = fixed_s
        self.figures["local_handover_bps"] = rate_bps
        fields = {"rdma_bps": max(rate_bps, _MIN_RDMA_BPS), "rdma_latency_s": fixed_s}
        return PdCluster.model_validate({**self.pd.model_dump(), **fields})

    # -------------------------------------------------------------------- all of it

    def fit(self) -> Fitted:
        m, base = self.m, self.base
        hardware = self._prefills()
        decode = self._decode()
        own = hardware[self.pd.hardware]
        hardware[self.pd.hardware] = HardwareProfile(gpus=own.gpus, prefill=own.prefill, decode=decode)
        kv, kv_source = self._bytes()
        links = tuple(self._link(link, kv, decode) for link in base.deployment.links)
        model = ModelProfile(
            name=self.name,
            kv=kv,
            kv_source=kv_source,
            hardware=hardware,
            max_input_tokens=base.model.max_input_tokens,
        )
        after = np.isfinite(m.handover_s[m.remote]).any()
        pipelining = base.transport.pipelining and not after
        if base.transport.pipelining and after:
            self.notes.append("transfers began after their prefill: pipelining is off in the scenario")
        changes: dict[str, Any] = {
            "name": self.name,
            "description": f"Fitted to {m.where}; built on scenario {base.name}.",
            "model": model,
            "deployment": Deployment(
                prfaas=base.deployment.prfaas, pd=(self._local(kv, decode),), links=links
            ),
            "link_capacity": ConstantCapacity(),
            "transport": base.transport.model_copy(update={"pipelining": pipelining}),
        }
        trace = self._trace()
        if trace is not None:
            span_s = float(m.arrival_s.max() - m.arrival_s.min())
            changes["measure"] = {"horizon_s": span_s + 1.0}
        try:
            scenario = base.replace(**changes)
        except ValidationError as error:
            raise first_error(error, f"{m.where}: the fitted scenario") from None
        return Fitted(
            model=model,
            scenario=scenario,
            trace=trace,
            qualities=self.qualities,
            figures=self.figures,
            left_out={k: n for k, n in m.left_out.items() if n},
            notes=tuple(self.notes),
            where=m.where,
            n=len(m),
        )

    def _trace(self) -> str | None:
        m = self.m
        known = np.isfinite(m.arrival_s) & np.isfinite(m.output_tokens) & (m.output_tokens >= 1)
        if not known.all() or m.arrival_s.max() <= m.arrival_s.min():
            self.notes.append("the workload is the scenario's: arrivals or output lengths are not all known")
            return None
        if (m.cached_tokens > 0).any():
            self.notes.append("the trace has no cache hits: every prompt of it counts as new")
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(("Timestamp", "Request tokens", "Response tokens"))
        start_s = float(m.arrival_s.min())
        for at_s, n_in, n_out in zip(m.arrival_s, m.input_tokens, m.output_tokens, strict=True):
            writer.writerow((f"{at_s - start_s:.6f}", int(n_in), int(n_out)))
        return out.getvalue()


def fit_deployment(measured: Measured, base: Scenario | None = None, name: str = "fitted") -> Fitted:
    """Fit profile, bytes, link and hand-over to measured requests.

    Prefill: requests that had their worker alone. Decode: time per output token against the sequences that ran
    meanwhile. Link: transfers that had it alone. What the log cannot tell stays as the base scenario has it, and the
    notes say so.

    Args:
        measured: the requests.
        base: clusters, counts, slots, clocks; default what the log says it ran.
        name: of the model and the scenario.

    Raises:
        PrfaasError: too little data for a fit, naming it and what was left out.
    """
    scenario = measured.scenario if base is None else base
    if scenario is None:
        raise PrfaasError(
            f"{measured.where}: a request log does not say what it ran on: --scenario names a scenario with the "
            "clusters, their counts and their decode slots"
        )
    known = {c.name for c in scenario.deployment.prfaas} | {c.name for c in scenario.deployment.pd}
    strange = sorted(set(measured.cluster) - known - {""}) if measured.scenario is not None else []
    if strange:
        raise PrfaasError(
            f"scenario {scenario.name}: no cluster {strange[0]!r}, which {measured.where} names"
        )
    return _Fitter(measured, scenario, name).fit()


def profile_yaml(model: ModelProfile) -> str:
    """A model as a file of the catalogue's schema."""
    content = model.model_dump(mode="json", exclude_none=True)
    CatalogueEntry.model_validate(content)
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=100)


def write_fitted(fitted: Fitted, folder: Path) -> list[Path]:
    """Write profile.yaml, scenario.yaml, report.json and, where arrivals are known, trace.csv.

    Raises:
        PrfaasError: a file cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PrfaasError(f"{folder}: cannot be made: {error.strerror}") from None
    scenario = fitted.scenario
    files = {"profile.yaml": profile_yaml(fitted.model)}
    if fitted.trace is not None:
        files["trace.csv"] = fitted.trace
        # relative to the scenario file, so that the folder can be moved
        workload = TraceWorkload(file="trace.csv", format="burstgpt", spread="never")
        scenario = scenario.replace(workload=workload)
    files["scenario.yaml"] = scenario_yaml(scenario)
    files["report.json"] = json.dumps(fitted.as_json(), indent=2, allow_nan=False) + "\n"
    for name, text in files.items():
        write_whole(folder / name, text)
    return [folder / name for name in files]
