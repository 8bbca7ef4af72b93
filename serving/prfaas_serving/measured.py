"""What a running deployment or a request log tells about latencies: one row per request, unknown values as NaN.

A decision log says when the legs of each request ran (`legs`). A request log in CSV or JSON lines has the columns of
`COLUMNS`; those it lacks are worked out where that is no guess, and else the fit that needs them says so.
"""

from __future__ import annotations

import csv
import json
import math
import os
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from prfaas_env.base import MAX_S, MAX_TOKENS, PrfaasError, one_line
from prfaas_env.profiles.fit import mean_batch, overlaps
from prfaas_env.scenarios.models import Scenario
from prfaas_env.simulator.formulas import NS_PER_S, FloatArray
from prfaas_env.workload.formats import text_lines
from prfaas_serving.decision_log import HeaderLine, LegTimes, Log, RequestLine, read_log

#: Columns of a request log and what they mean; the first two must be there.
COLUMNS = {
    "input_tokens": "tokens of the prompt",
    "ttft_s": "arrival to first token",
    "arrival_s": "arrival, any origin",
    "cached_tokens": "tokens of the prompt that a cache had (or give incremental_tokens)",
    "incremental_tokens": "tokens that no cache had",
    "output_tokens": "tokens of the answer",
    "tpot_s": "mean time per output token after the first",
    "path": "local or remote; local where it is empty or there is no such column",
    "prefill_s": "time of the prefill on its worker, without waiting",
    "prefill_ahead": "prefills at the worker when this one was sent there, waiting or running",
    "concurrency": "requests on its path when it arrived, itself counted",
    "running": "mean number of sequences that decoded on its worker meanwhile, itself counted",
    "transferred_bytes": "bytes of KV that crossed the link",
    "transfer_s": "end of the prefill to the KV being there, without the first decode step",
    "transfers": "most transfers on the link meanwhile, itself counted",
}
Path_ = Literal["local", "remote"]
_FETCH_S = 30.0
_MAX_FIELD = 1e18


@dataclass(frozen=True)
class Measured:
    """Requests that were answered whole and at the first try, in order of arrival. Arrays have shape (n,)."""

    where: str
    """File or address."""
    scenario: Scenario | None
    """What the deployment was told to be, where the log says it."""
    cluster: NDArray[np.str_]
    """Cluster that prefilled; "" = the decode worker did."""
    remote: NDArray[np.bool_]
    arrival_s: FloatArray
    input_tokens: FloatArray
    cached_tokens: FloatArray
    output_tokens: FloatArray
    ttft_s: FloatArray
    tpot_s: FloatArray
    prefill_s: FloatArray
    """Service time of a prefill that had its worker alone."""
    handover_s: FloatArray
    """End of the prefill to the first token, less the first decode step where `with_step` is False."""
    with_step: bool
    alone: NDArray[np.bool_]
    """Whether its transfer had the link alone."""
    n_bytes: FloatArray
    """Bytes of KV that were sent, where that was measured."""
    batch: FloatArray
    """Mean sequences on its decode worker."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Requests not used, and prefills not used, by reason."""
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.arrival_s)


def read_measured(source: str, token_env: str | None = None) -> Measured:
    """Read a decision log, a router's admin port (`http://...`) or a request log.

    Args:
        source: file or address.
        token_env: environment variable that holds the token of the admin port.

    Raises:
        PrfaasError: it cannot be read, or holds no finished request.
    """
    if source.startswith(("http://", "https://")):
        return replace(of_log(_fetch(source, token_env)), where=source)
    path = Path(source)
    if not path.is_file():
        raise PrfaasError(f"--from {source}: no such file")
    return of_log(read_log(path)) if _is_decision_log(path) else of_table(path)


def _is_decision_log(path: Path) -> bool:
    with path.open("rb") as file:
        return file.readline(200).lstrip().startswith(b'{"kind":"header"')


# ------------------------------------------------------------------------------------ a decision log


def _fetch(address: str, token_env: str | None) -> Log:
    """The last requests of a running router, as a log."""
    url = address.rstrip("/") + "/requests"
    token = "" if token_env is None else os.environ.get(token_env, "")
    if token_env is not None and not token:
        raise PrfaasError(f"--token-env {token_env}: the variable is not set")
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
    try:
        with urllib.request.urlopen(request, timeout=_FETCH_S) as answer:
            content = json.loads(answer.read())
    except urllib.error.HTTPError as error:
        hint = {401: "; --token-env names the variable with its token", 409: "; it has no `control`"}
        raise PrfaasError(f"{url}: status {error.code}{hint.get(error.code, '')}") from None
    except (OSError, ValueError) as error:
        raise PrfaasError(f"{url}: {one_line(error)}") from None
    try:
        header = HeaderLine.from_json(json.dumps(content["header"]))
        lines = tuple(RequestLine.from_json(json.dumps(line)) for line in content["requests"])
    except (KeyError, TypeError, PrfaasError) as error:
        raise PrfaasError(f"{url}: not the answer of a router of this version: {one_line(error)}") from None
    return Log(Path(address), header, lines, tuple((Path(url), k) for k in range(len(lines))), 0, 1)


def of_log(log: Log) -> Measured:
    """What the request lines of a decision log tell.

    The service time of a prefill is that of its leg, for prefills that were alone at their worker, and the usual time
    from its turn to the sending of the leg. What runs on a decode worker meanwhile follows from the other lines.

    Raises:
        PrfaasError: no usable request, or a log without the times of the legs.
    """
    left: Counter[str] = Counter()
    every = [line for line in log.requests if line.legs is not None and line.ttft_s is not None]
    if log.requests and not any(line.legs is not None for line in log.requests):
        raise PrfaasError(
            f"{log.path}: its requests have no `legs` (written by an earlier version): nothing says when their "
            "prefills ran"
        )
    used: list[tuple[RequestLine, LegTimes]] = []
    for line in sorted(log.requests, key=lambda line: (line.arrival_ns, line.end_ns or 0)):
        legs = line.legs
        if line.outcome != "finished" or line.ttft_s is None or legs is None:
            left["did not finish"] += 1
        elif legs.attempts > 1:
            left["took more than one try"] += 1
        else:
            used.append((line, legs))
    if not used:
        raise PrfaasError(
            f"{log.path}: no request that finished at its first try ({len(log.requests)} in all)"
        )
    scenario = log.scenario
    remote_names = {c.name for c in scenario.deployment.prfaas}
    arrival = np.array([line.arrival_ns for line, _ in used]) / NS_PER_S
    ttft = np.array([line.ttft_s for line, _ in used], dtype=np.float64)
    first = arrival + ttft
    decode_sent = _seconds(legs.decode_sent_ns for _, legs in used)
    prefill_end = _seconds(legs.prefill_end_ns for _, legs in used)
    remote = np.array([legs.prefill_cluster in remote_names for _, legs in used])
    cluster = np.array([legs.prefill_cluster or "" for _, legs in used])
    prefill, notes = _prefill_s(used, arrival, left)
    early = decode_sent < prefill_end
    # a transfer runs from the sending of the decode leg on, but not before there is a cache
    handover = first - np.where(early, math.nan, decode_sent)
    if early.any():
        notes.append(
            f"{int(early.sum())} requests had their decode leg sent before the prefill was over: what they tell of the "
            "link is not used"
        )
    told = np.array([math.nan if legs.kv_bytes is None else legs.kv_bytes for _, legs in used])
    return Measured(
        where=str(log.path),
        scenario=scenario,
        cluster=cluster,
        remote=remote,
        arrival_s=arrival,
        input_tokens=np.array([float(line.input_tokens) for line, _ in used]),
        cached_tokens=np.array([_cached(line, legs) for line, legs in used]),
        output_tokens=np.array([float(line.output_tokens) for line, _ in used]),
        ttft_s=ttft,
        tpot_s=np.array(
            [
                line.tpot_s if line.tpot_s is not None and line.output_tokens > 1 else math.nan
                for line, _ in used
            ]
        ),
        prefill_s=prefill,
        handover_s=handover,
        with_step=True,
        alone=_alone_on_link(every, used, remote_names),
        n_bytes=told,
        batch=_batches(every, used),
        left_out=left,
        notes=tuple(notes),
    )


def _seconds(values: Iterable[int | None]) -> FloatArray:
    return np.array([math.nan if v is None else v / NS_PER_S for v in values])


def _cached(line: RequestLine, legs: LegTimes) -> float:
    """Tokens that the cache of the prefilling cluster had, as known at the door."""
    incremental = line.incremental_tokens.get(legs.prefill_cluster or "", line.input_tokens)
    return float(max(line.input_tokens - incremental, 0))


def _prefill_s(
    used: Sequence[tuple[RequestLine, LegTimes]], arrival_s: FloatArray, left: Counter[str]
) -> tuple[FloatArray, list[str]]:
    """Service times: the leg, and what usually passes between a request's turn and the sending of its leg."""
    free_s: dict[str, float] = {}
    leg_s, gaps = np.full(len(used), math.nan), []
    order = sorted(range(len(used)), key=lambda k: used[k][1].prefill_sent_ns or 0)
    for k in order:
        legs = used[k][1]
        if legs.prefill_worker is None or legs.prefill_sent_ns is None:
            left["prefill: by the decode worker"] += 1
            continue
        if legs.prefill_end_ns is None:
            left["prefill: its end is not known"] += 1
            continue
        sent, end = legs.prefill_sent_ns / NS_PER_S, legs.prefill_end_ns / NS_PER_S
        if legs.prefill_ahead != 0:
            left["prefill: behind another one at its worker"] += 1
        elif end > sent:
            leg_s[k] = end - sent
            turn = max(float(arrival_s[k]), free_s.get(legs.prefill_worker, -math.inf))
            gaps.append(max(sent - turn, 0.0))
        free_s[legs.prefill_worker] = max(end, free_s.get(legs.prefill_worker, -math.inf))
    gap_s = float(np.median(gaps)) if gaps else 0.0
    return leg_s + gap_s, [f"{gap_s * 1e3:.1f} ms from a prefill's turn to its sending count as part of it"]


def _decode_span(line: RequestLine) -> tuple[float, float]:
    begin = line.arrival_ns / NS_PER_S + (line.ttft_s or 0.0)
    return begin, max(begin, begin if line.end_ns is None else line.end_ns / NS_PER_S)


def _batches(every: Sequence[RequestLine], used: Sequence[tuple[RequestLine, LegTimes]]) -> FloatArray:
    """Mean sequences on the decode worker of each used request, from all answers that there were."""
    found: dict[int, float] = {}
    by_worker: dict[str | None, list[RequestLine]] = {}
    for line in every:
        by_worker.setdefault(line.legs.decode_worker if line.legs else None, []).append(line)
    for lines in by_worker.values():
        spans = np.array([_decode_span(line) for line in lines])
        for line, batch in zip(lines, mean_batch(spans[:, 0], spans[:, 1]), strict=True):
            found[id(line)] = float(batch)
    return np.array([found[id(line)] for line, _ in used])


def _alone_on_link(
    every: Sequence[RequestLine], used: Sequence[tuple[RequestLine, LegTimes]], remote_names: set[str]
) -> NDArray[np.bool_]:
    """Whether no other transfer from the same cluster was open meanwhile."""
    alone: dict[int, bool] = {}
    by_link: dict[str, list[RequestLine]] = {}
    for line in every:
        legs = line.legs
        if legs is not None and legs.prefill_cluster in remote_names and legs.decode_sent_ns is not None:
            by_link.setdefault(str(legs.prefill_cluster), []).append(line)
    for lines in by_link.values():
        begins = _seconds(line.legs.decode_sent_ns for line in lines if line.legs is not None)
        ends = np.array([_decode_span(line)[0] for line in lines])
        for line, shared in zip(lines, overlaps(begins, np.maximum(ends, begins)), strict=True):
            alone[id(line)] = not shared
    return np.array([alone.get(id(line), False) for line, _ in used])


# ------------------------------------------------------------------------------------ a request log


def of_table(path: Path) -> Measured:
    """A request log in CSV (with a header) or JSON lines, with the columns of `COLUMNS`; others are left alone.

    Raises:
        PrfaasError: naming file, line and column.
    """
    rows = list(_csv_rows(path) if path.suffix.lower() == ".csv" else _json_rows(path))
    if not rows:
        raise PrfaasError(f"{path}: holds no request")
    present = set().union(*(row.keys() for _, row in rows)) & COLUMNS.keys()
    for name in ("input_tokens", "ttft_s"):
        if name not in present:
            raise PrfaasError(f"{path}: no column {name}; columns: {', '.join(COLUMNS)}")
    values = {
        name: np.array([_number(path, number, name, row.get(name)) for number, row in rows])
        for name in COLUMNS
        if name != "path"
    }
    remote = np.array([_is_remote(path, number, row.get("path")) for number, row in rows])
    left: Counter[str] = Counter()
    whole = np.isfinite(values["ttft_s"]) & np.isfinite(values["input_tokens"])
    left["no ttft_s or input_tokens"] = int((~whole).sum())
    order = np.argsort(np.where(np.isfinite(values["arrival_s"]), values["arrival_s"], 0.0), kind="stable")
    order = order[whole[order]]
    if not len(order):
        raise PrfaasError(f"{path}: no request has both input_tokens and ttft_s")
    values = {name: column[order] for name, column in values.items()}
    return _of_columns(str(path), values, remote[order], left)


def _csv_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            for row in reader:
                if None in row:
                    raise PrfaasError(f"{path}:{reader.line_num}: more fields than columns")
                yield reader.line_num, {str(k).strip(): v for k, v in row.items()}
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise PrfaasError(f"{path}: cannot be read: {one_line(error)}") from None


def _json_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in text_lines(path):
        try:
            row = json.loads(line)
        except ValueError:
            raise PrfaasError(f"{path}:{number}: not a JSON object on one line") from None
        if not isinstance(row, dict):
            raise PrfaasError(f"{path}:{number}: not a JSON object, found {type(row).__name__}")
        yield number, row


def _number(path: Path, line: int, name: str, raw: Any) -> float:
    """A value that is not negative, NaN where there is none."""
    if raw is None or raw == "":
        return math.nan
    if isinstance(raw, bool):
        raise PrfaasError(f"{path}:{line}: {name} must be a number, found {raw!r}")
    try:
        value = float(raw)
    except (TypeError, ValueError):
        raise PrfaasError(f"{path}:{line}: {name} must be a number, found {raw!r:.80}") from None
    most = MAX_S * 10 if name.endswith("_s") else MAX_TOKENS if name.endswith("_tokens") else _MAX_FIELD
    if not 0 <= value <= most:
        raise PrfaasError(f"{path}:{line}: {name} must be within 0 and {most:g}, found {raw!r:.80}")
    return value


def _is_remote(path: Path, line: int, raw: Any) -> bool:
    if raw in (None, "", "local", "remote"):
        return bool(raw == "remote")
    raise PrfaasError(f"{path}:{line}: path must be local or remote, found {raw!r:.80}")


def _of_columns(
    where: str, v: dict[str, FloatArray], remote: NDArray[np.bool_], left: Counter[str]
) -> Measured:
    """Work out what the columns do not say, where they allow it."""
    notes: list[str] = []
    cached = v["cached_tokens"]
    cached = np.where(np.isfinite(cached), cached, v["input_tokens"] - v["incremental_tokens"])
    cached = np.where(np.isfinite(cached), np.clip(cached, 0.0, v["input_tokens"]), 0.0)
    first = v["arrival_s"] + v["ttft_s"]
    prefill = _table_prefill_s(v, remote, left, notes)
    alone = v["transfers"] == 1
    if not np.isfinite(v["transfers"]).any():
        known = np.isfinite(first) & np.isfinite(v["transfer_s"]) & remote
        step = np.where(np.isfinite(v["tpot_s"]), v["tpot_s"], 0.0)
        begins = np.where(known, first - v["transfer_s"] - step, 0.0)[known]
        alone = np.zeros(len(remote), dtype=np.bool_)
        alone[known] = ~overlaps(begins, (first - step)[known])
    batch = v["running"]
    if not np.isfinite(batch).any():
        last = first + v["tpot_s"] * (v["output_tokens"] - 1)
        known = np.isfinite(last)
        batch = np.full(len(remote), math.nan)
        if known.any():
            batch[known] = mean_batch(first[known], np.maximum(last, first)[known])
            notes.append(
                "sequences that decoded together follow from arrivals and times, as of one decode worker"
            )
        else:
            batch = np.ones(len(remote))
            notes.append("nothing says how many sequences decoded together: the decode step is taken as one")
    return Measured(
        where=where,
        scenario=None,
        cluster=np.where(remote, "remote", "local"),
        remote=remote,
        arrival_s=v["arrival_s"],
        input_tokens=v["input_tokens"],
        cached_tokens=cached,
        output_tokens=v["output_tokens"],
        ttft_s=v["ttft_s"],
        tpot_s=np.where(v["output_tokens"] == 1, math.nan, v["tpot_s"]),
        prefill_s=prefill,
        handover_s=v["transfer_s"],
        with_step=False,
        alone=alone,
        n_bytes=v["transferred_bytes"],
        batch=batch,
        left_out=left,
        notes=tuple(notes),
    )


def _table_prefill_s(
    v: dict[str, FloatArray], remote: NDArray[np.bool_], left: Counter[str], notes: list[str]
) -> FloatArray:
    """Service times: given, or first-token times of requests that had their path to themselves."""
    given, ahead = v["prefill_s"], v["prefill_ahead"]
    if np.isfinite(given).any():
        behind = np.isfinite(given) & (ahead > 0)
        left["prefill: behind another one at its worker"] += int(behind.sum())
        left["prefill: no prefill_s"] += int((~np.isfinite(given)).sum())
        return np.where(behind, math.nan, given)
    idle = v["concurrency"] == 1
    if not np.isfinite(v["concurrency"]).any():
        if not np.isfinite(v["arrival_s"]).any():
            raise PrfaasError(
                "nothing says which requests found an idle worker: give prefill_s (with prefill_ahead where a worker "
                "queues), concurrency, or arrival_s"
            )
        idle = np.zeros(len(remote), dtype=np.bool_)
        for side in (True, False):
            of = (remote == side) & np.isfinite(v["arrival_s"])
            idle[of] = ~overlaps(v["arrival_s"][of], (v["arrival_s"] + v["ttft_s"])[of])
    left["prefill: its path was not idle"] += int((~idle).sum())
    unknown = idle & remote & ~np.isfinite(v["transfer_s"])
    left["prefill: remote, without transfer_s it cannot be told from the transfer"] += int(unknown.sum())
    after = np.where(np.isfinite(v["transfer_s"]), v["transfer_s"], 0.0)
    after += np.where(np.isfinite(v["tpot_s"]), v["tpot_s"], 0.0)
    seconds = v["ttft_s"] - after
    notes.append("prefill times are first-token times on an idle path, less transfer and first decode step")
    return np.where(idle & ~unknown & (seconds > 0.0), seconds, math.nan)
