"""A worker's /metrics: vLLM's names where the figure is the same, so that the router reads them, and its own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector, Summary, generate_latest

from prfaas_serving.workers.transfers import Transfer


class WorkerMetrics:
    """All figures of one worker, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = r = CollectorRegistry()
        ProcessCollector(registry=r)
        self.running = Gauge("vllm:num_requests_running", "Requests at the model.", registry=r)
        self.waiting = Gauge("vllm:num_requests_waiting", "Requests that wait.", registry=r)
        self.by_reason = Gauge(
            "vllm:num_requests_waiting_by_reason", "Of these by reason.", ["reason"], registry=r
        )
        self.kv_use = Gauge("vllm:kv_cache_usage_perc", "Share of the room for caches in use.", registry=r)
        self.prompt_tokens = Counter(
            "vllm:prompt_tokens_by_source",
            "Prompt tokens by where their cache came from.",
            ["source"],
            registry=r,
        )
        self.success = Counter("vllm:request_success", "Requests answered.", ["finished_reason"], registry=r)
        self.generated = Counter("vllm:generation_tokens", "Tokens of answers.", registry=r)
        self.fetched_bytes = Summary(
            "vllm:nixl_bytes_transferred", "Tensor bytes of each cache that was fetched.", registry=r
        )
        self.fetch_seconds = Summary(
            "vllm:nixl_xfer_time_seconds", "Time from its order to the last byte of each.", registry=r
        )
        self.failed = Counter(
            "vllm:nixl_num_failed_transfers", "Caches that could not be fetched.", registry=r
        )
        self.expired = Counter(
            "vllm:nixl_num_kv_expired_reqs", "Caches that nobody fetched in time.", registry=r
        )
        self.prefill_seconds = Summary(
            "prfaas_worker_prefill_seconds", "Time of each prefill, waiting apart.", registry=r
        )
        self.step_seconds = Summary("prfaas_worker_step_seconds", "Time of each decode step.", registry=r)
        self.staged = Gauge("prfaas_worker_staged", "Caches that wait to be fetched.", registry=r)
        self.staged_bytes = Gauge("prfaas_worker_staged_bytes", "Their bytes.", registry=r)
        self.sent_bytes = Summary("prfaas_worker_sent_bytes", "Tensor bytes of each cache sent.", registry=r)
        self.sent_wire_bytes = Counter(
            "prfaas_worker_sent_wire_bytes", "The same with headers of parts.", registry=r
        )
        self.tail_seconds = Summary(
            "prfaas_worker_tail_seconds",
            "Time from the end of each prefill to the arrival of its cache.",
            registry=r,
        )
        self.role = Gauge("prfaas_worker_role", "1 for the role in force.", ["role"], registry=r)
        self.role_changes = Counter("prfaas_worker_role_changes", "Changes of role.", registry=r)
        for source in ("local_compute", "local_cache_hit", "external_kv_transfer"):
            self.prompt_tokens.labels(source)

    def sent(self, transfer: Transfer) -> None:
        """A cache went out, or did not."""
        if transfer.outcome == "done":
            self.sent_bytes.observe(transfer.tensor_bytes)
            self.sent_wire_bytes.inc(transfer.wire_bytes)
            self.tail_seconds.observe(transfer.tail_s or 0.0)

    def fetched(self, transfer: Transfer) -> None:
        """A cache came in."""
        self.fetched_bytes.observe(transfer.tensor_bytes)
        self.fetch_seconds.observe(transfer.last_byte_s or 0.0)

    def page(self) -> bytes:
        """The page."""
        return generate_latest(self.registry)
