"""The router's own metrics, in a registry of its own."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from prfaas_serving.config import ControlMode
from prfaas_serving.decision_log import Guard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from prfaas_serving.control import ControlLoop
    from prfaas_serving.forward import Forwarder

_FAILED = "vllm:nixl_num_failed_transfers_total"
_TTFT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120)


class Metrics:
    """Counters of events. Label values are bounded: routes, reasons and worker names, never anything of a client."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"prfaas_router_{name}", text, labels, registry=self.registry)

        self.requests = counter("requests", "requests answered, by status class", "status")
        self.decisions = counter("decisions", "routes chosen at the door", "route", "reason")
        self.fallbacks = counter("fallbacks", "routes taken after a failure", "to", "cause")
        self.retries_refused = counter("retries_refused", "retries that the budget did not allow")
        self.deadlines = counter("deadline_hits", "legs given up by their deadline", "leg")
        self.worker_failures = counter("worker_failures", "failures that feed breakers", "worker", "kind")
        self.refusals = counter("worker_refusals", "429 and 503 of workers", "worker")
        self.released = counter("handles_released", "staged KV given back without a decode", "outcome")
        self.no_handover = counter("no_handover", "prefill answers that handed nothing over", "worker")
        self.mismatches = counter("handle_mismatches", "hand-overs for another prompt, not used", "worker")
        self.stream_errors = counter("stream_errors", "streams that ended with an error event", "kind")
        self.client_gone = counter("client_gone", "clients that left before the end", "phase")
        self.stripped = counter("stripped_fields", "hand-over fields that clients sent", "field")
        self.rejected = counter("rejected", "requests refused at the door", "reason")
        self.finished = counter("finished", "decided requests that were answered whole")
        self.good = counter("finished_in_slo", "of these, those that met every objective of the scenario")
        self.reconnects = counter("reconnects", "requests sent again on a new connection")
        self.lengths = counter("prompt_lengths", "prompts counted, by where the length came from", "source")
        self.prompt_tokens = counter("prompt_tokens", "prompt tokens by route", "route")
        self.cached_tokens = counter("cached_tokens", "prompt tokens that prefill workers had cached")
        self.output_tokens = counter("output_tokens", "tokens (events where usage is not told) sent")
        self.kv_bytes = counter("kv_bytes", "predicted KV bytes sent over links", "cluster")
        self.ttft = Histogram(
            "prfaas_router_ttft_seconds",
            "arrival to first token of any channel",
            ("route",),
            buckets=_TTFT_BUCKETS,
            registry=self.registry,
        )
        self.prefill_seconds = Histogram(
            "prfaas_router_prefill_seconds",
            "prefill leg",
            ("route",),
            buckets=_TTFT_BUCKETS,
            registry=self.registry,
        )

    def watch(self, forwarder: Forwarder) -> None:
        """Add the gauges that are read when asked for."""
        self.registry.register(_State(forwarder))

    def watch_control(self, control: ControlLoop) -> None:
        """Add the gauges of a control loop."""
        self.registry.register(_Control(control))

    def watch_alarms(self, alarms: Callable[[], Iterable[tuple[str, str]]]) -> None:
        """Add a gauge of the alarms raised now; `alarms` gives (name, level) of each."""
        self.registry.register(_Alarms(alarms))

    def page(self) -> bytes:
        """The text of /metrics."""
        return generate_latest(self.registry)


class _Alarms(Collector):
    def __init__(self, alarms: Callable[[], Iterable[tuple[str, str]]]) -> None:
        self._alarms = alarms

    def describe(self) -> Iterable[Any]:
        """Nothing: values exist only while they are read."""
        return []

    def collect(self) -> Iterable[Any]:
        """1 per alarm raised now."""
        found = GaugeMetricFamily(
            "prfaas_router_alarm", "1 = raised now, as on the page", labels=("alarm", "level")
        )
        for name, level in self._alarms():
            found.add_metric((name, level), 1.0)
        yield found


class _State(Collector):
    def __init__(self, forwarder: Forwarder) -> None:
        self._forwarder = forwarder

    def describe(self) -> Iterable[Any]:
        """Nothing: values exist only while they are read."""
        return []

    def collect(self) -> Iterable[Any]:
        """Gauges of the decision, pools, workers and links."""
        f, now_s = self._forwarder, time.monotonic()

        def family(
            name: str, text: str, labels: tuple[str, ...], rows: list[tuple[tuple[str, ...], float]]
        ) -> Any:
            found = GaugeMetricFamily(f"prfaas_router_{name}", text, labels=labels)
            for values, number in rows:
                found.add_metric(values, number)
            return found

        holder, workers = f.holder, list(f.fleet)
        yield family("open_requests", "requests in the router", (), [((), float(f.open_requests))])
        yield family(
            "handles_open", "staged KV caches not yet fetched or released", (), [((), float(f.handles_open))]
        )
        yield family("threshold_tokens", "threshold in force", (), [((), holder.threshold_tokens)])
        if holder.margin_s is not None:
            yield family("margin_seconds", "margin in force", (), [((), holder.margin_s)])
        yield family("decision_version", "number of the decision in force", (), [((), float(holder.version))])
        pools = [((p.cluster, p.role), p) for p in f.fleet.pools()]
        yield family(
            "queue",
            "requests waiting here for a worker",
            ("cluster", "role"),
            [(k, float(p.waiting)) for k, p in pools],
        )
        yield family(
            "usable_workers",
            "workers that may get requests",
            ("cluster", "role"),
            [(k, float(len(p.usable(now_s)))) for k, p in pools],
        )
        yield family(
            "worker_in_flight",
            "requests there",
            ("worker",),
            [((w.name,), float(w.in_flight)) for w in workers],
        )
        yield family(
            "worker_up", "1 = up", ("worker",), [((w.name,), float(w.state == "up")) for w in workers]
        )
        yield family(
            "worker_kv_moved_share",
            "tokens whose KV the worker says it fetched, over those it was told to fetch",
            ("worker",),
            [((w.name,), w.kv_moved_share) for w in workers if w.kv_moved_share is not None],
        )
        yield family(
            "worker_failed_transfers",
            "KV transfers that the worker says failed; it prefilled those prompts itself",
            ("worker",),
            [((w.name,), w.load.fields[_FAILED]) for w in workers if _FAILED in w.load.fields],
        )
        links = f.paths.links.items()
        yield family(
            "link_backlog_bits",
            "routed and not arrived",
            ("cluster",),
            [((n,), k.backlog_bits(now_s)) for n, k in links],
        )
        yield family(
            "link_observed_bps",
            "capacity reckoned with",
            ("cluster",),
            [((n,), k.observed_bps(now_s)) for n, k in links],
        )
        yield family(
            "link_nominal_bps",
            "configured capacity",
            ("cluster",),
            [((n,), k.nominal_bps) for n, k in links],
        )
        yield family(
            "link_open_transfers",
            "transfers under way",
            ("cluster",),
            [((n,), float(k.open_flows)) for n, k in links],
        )
        carried = CounterMetricFamily(
            "prfaas_router_link_carried_bits", "predicted bits carried by the link", labels=("cluster",)
        )
        for name, link in links:
            carried.add_metric((name,), link.carried_bits(now_s))
        yield carried
        slo = f.resolved.scenario.slo
        yield family(
            "slo_seconds",
            "objective of the scenario",
            ("objective",),
            [((n,), v) for n, v in (("ttft", slo.ttft_s), ("tpot", slo.tpot_s)) if v is not None],
        )


class _Control(Collector):
    def __init__(self, control: ControlLoop) -> None:
        self._control = control

    def describe(self) -> Iterable[Any]:
        """Nothing: values exist only while they are read."""
        return []

    def collect(self) -> Iterable[Any]:
        """Mode, guard, age of what workers say, ticks and moves."""
        c = self._control

        def family(name: str, text: str, label: str | None, rows: dict[str, float]) -> Any:
            found = GaugeMetricFamily(f"prfaas_router_control_{name}", text, labels=(label,) if label else ())
            for value, number in rows.items():
                found.add_metric([value] if label else [], number)
            return found

        modes = {m: float(m == c.mode) for m in get_args(ControlMode)}
        guards = {g: float(g == c.guard) for g in get_args(Guard)}
        yield family("mode", "1 = the mode now", "mode", modes)
        yield family("guard", "1 = the guard now", "guard", guards)
        stale_s = c.live.stale_s(time.monotonic())
        yield family("stale_seconds", "age of the oldest figures in use", None, {"": stale_s})
        yield family(
            "ticks",
            "ticks by who decided",
            "by",
            {k: float(v) for k, v in c.counts.items() if "moves" not in k},
        )
        moves = {k: float(c.counts[k]) for k in ("moves", "moves_refused", "illegal_moves")}
        yield family("moves", "node moves ordered", "outcome", moves)
        yield family("late_ticks", "ticks that were skipped", None, {"": float(c.late_ticks)})
        dropped = 0.0 if c.log is None else float(c.log.dropped)
        yield family("log_dropped_lines", "lines of the decision log not written", None, {"": dropped})
