"""What the router asks of an engine apart from requests: health, load, tokenizing.

Each engine words these differently; asking the wrong path (vLLM has no /get_load, SGLang no /load) would quietly turn
a choice by load into a random one, so that a page without any known figure counts as a failed poll.
"""

from __future__ import annotations

import math
from typing import Any

import orjson

from prfaas_serving.backends.dynamo_instances import read_instances

#: Path of the health check.
HEALTH_PATH = {"vllm": "/health", "sglang": "/health", "dynamo": "/health", "echo": "/health"}
#: Path of the load figures; None = the engine has none per worker.
LOAD_PATH = {
    "vllm": "/metrics",
    "sglang": "/v1/loads?include=core,disagg,queues",
    "dynamo": None,
    "echo": None,
}
#: Engines with POST /tokenize.
TOKENIZES = frozenset({"vllm"})

#: vLLM metrics that are read; the older name of the cache use is understood too.
VLLM_METRICS = frozenset(
    {
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:num_requests_waiting_by_reason",
        "vllm:kv_cache_usage_perc",
        "vllm:gpu_cache_usage_perc",
        "vllm:prompt_tokens_by_source_total",
        "vllm:nixl_bytes_transferred_sum",
        "vllm:nixl_num_failed_transfers_total",
        "vllm:nixl_num_kv_expired_reqs_total",
        "process_start_time_seconds",
    }
)


def read_health(engine: str, content: bytes, instance_id: str | None) -> str | None:
    """What is wrong with a worker although its health check answered 200; None if nothing is.

    A Dynamo frontend answers for all of its instances: one that it does not list is not there.
    """
    if engine != "dynamo":
        return None
    try:
        instances = read_instances(orjson.loads(content))
    except orjson.JSONDecodeError:
        instances = None
    if instances is None:
        return "no list of instances"
    return None if any(i.instance_id == instance_id for i in instances) else "a list without its instance"


class Unreadable(Exception):
    """A load page in which nothing known was found."""


def prometheus_values(text: str, wanted: frozenset[str]) -> dict[str, float]:
    """Values of the wanted metrics by `name` or `name{label="value"}` as written, engine labels dropped.

    Values of the same key (several engines of one server) are added; NaN and infinity are left out.
    """
    found: dict[str, float] = {}
    for line in text.splitlines():
        if not line or line[0] == "#":
            continue
        head, _, rest = line.rpartition(" ")
        name, brace, labels = head.partition("{")
        if name not in wanted:
            continue
        try:
            value = float(rest)
        except ValueError:
            continue
        if math.isfinite(value):
            key = name + _kept(labels) if brace else name
            found[key] = found.get(key, 0.0) + value
    return found


def _kept(labels: str) -> str:
    """The `reason` or `source` label of a metric, which tells its values apart."""
    for part in labels.rstrip("}").split(","):
        key, _, value = part.partition("=")
        if key in {"reason", "source"}:
            return f"{{{value.strip(chr(34))}}}"
    return ""


def read_load(engine: str, content: bytes) -> tuple[float, float, float | None, dict[str, float]]:
    """(running, waiting, share of the KV room used, all figures) of a load page.

    Raises:
        Unreadable: nothing known is in it.
    """
    if engine == "sglang":
        return _sglang_load(content)
    fields = prometheus_values(content.decode(errors="replace"), VLLM_METRICS)
    running = fields.get("vllm:num_requests_running")
    waiting = fields.get("vllm:num_requests_waiting")
    if running is None or waiting is None:
        raise Unreadable
    use = fields.get("vllm:kv_cache_usage_perc", fields.get("vllm:gpu_cache_usage_perc"))
    return running, waiting, use, fields


#: Queues of SGLang's disaggregation: requests there wait, for a partner, for room, or for a transfer.
_SGLANG_QUEUES = (
    "prefill_bootstrap_queue_reqs",
    "prefill_inflight_queue_reqs",
    "decode_prealloc_queue_reqs",
    "decode_transfer_queue_reqs",
)


def _sglang_load(content: bytes) -> tuple[float, float, float | None, dict[str, float]]:
    try:
        page = orjson.loads(content)
    except orjson.JSONDecodeError:
        raise Unreadable from None
    listed = page.get("loads") if isinstance(page, dict) else page
    ranks = [rank for rank in listed if isinstance(rank, dict)] if isinstance(listed, list) else []
    fields: dict[str, float] = {}
    for rank in ranks:
        _add_numbers(fields, rank, "")
    running = fields.get("num_running_reqs")
    if running is None:
        raise Unreadable
    waiting = fields.get("num_waiting_reqs", fields.get("num_queue_reqs", 0.0))
    waiting += sum(fields.get(f"disaggregation.{name}", 0.0) for name in _SGLANG_QUEUES)
    use = max((rank["token_usage"] for rank in ranks if _is_share(rank.get("token_usage"))), default=None)
    return running, waiting, use, fields


def _is_share(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _add_numbers(found: dict[str, float], part: Any, prefix: str) -> None:
    for key, value in part.items() if isinstance(part, dict) else ():
        if isinstance(value, dict):
            _add_numbers(found, value, f"{prefix}{key}.")
        elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            found[prefix + key] = found.get(prefix + key, 0.0) + float(value)


#: Engines whose workers keep the role they were started with.
FIXED_ROLE = frozenset({"dynamo"})
