"""One client request: parsing, what is taken from it, why it must stay local, headers, error bodies."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson
from multidict import CIMultiDict, CIMultiDictProxy

#: Routes that can be disaggregated; any other /v1/... path goes whole to a decode worker.
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
TWO_LEG_ROUTES = frozenset({COMPLETIONS, CHAT})

#: Fields that steer the hand-over between workers. A client's own would let it read foreign caches or crash engines.
STRIPPED_FIELDS = (
    "kv_transfer_params",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "bootstrap_pair_key",
    "disagg_prefill_dp_rank",
    "disaggregated_params",
)
#: The same within Dynamo's `nvext`.
STRIPPED_NVEXT = (
    "backend_instance_id",
    "prefill_worker_id",
    "decode_worker_id",
    "dp_rank",
    "prefill_dp_rank",
    "allowed_worker_ids",
    "routing_constraints",
)
#: Headers that steer routing behind us.
STRIPPED_HEADERS = frozenset(
    {
        "x-prefiller-host-port",
        "x-prefiller-url",
        "x-encoder-hosts-ports",
        "x-data-parallel-host-port",
        "x-data-parallel-rank",
        "x-dynamo-prefill-instance-id",
        "x-dynamo-worker-instance-id",
        "x-dynamo-prefill-dp-rank",
        "x-dynamo-dp-rank",
        "x-prefill-instance-id",
        "x-worker-instance-id",
        "x-prefill-dp-rank",
        "x-dp-rank",
        "x-bypass-remote-prefill",
        "epp-profile",
    }
)
#: RFC 9110, section 7.6.1, with the ones that older proxies send.
HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
_NOT_FORWARDED = (
    HOP_BY_HOP
    | STRIPPED_HEADERS
    | {
        "host",
        "content-length",
        "accept-encoding",
        "expect",
        "content-encoding",
        "x-request-id",
        "content-type",
    }
)
#: Names of the output limit, per API, that a prefill leg must clamp.
OUTPUT_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")

#: Where a decode worker says how many bytes of KV it fetched (the project's own worker does).
KV_BYTES_HEADER = "X-Prfaas-Kv-Bytes"
ROUTE_HEADER = "X-Prfaas-Route"
REASON_HEADER = "X-Prfaas-Reason"
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class ClientError(Exception):
    """A request that the router itself answers with an error."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str,
        *,
        kind: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.kind = kind or ("invalid_request_error" if status < 500 and status != 429 else "server_error")
        self.retry_after_s = retry_after_s

    def body(self) -> bytes:
        """As OpenAI's API words it."""
        return error_body(self.message, self.kind, self.code)


def error_body(message: str, kind: str, code: str | int | None) -> bytes:
    """An error object as OpenAI's API words it."""
    return orjson.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}})


@dataclass(eq=False)
class Job:
    """One request of a client.

    Args:
        path: its path.
        raw: its body as it came.
        body: its body parsed, without the stripped fields; empty for other routes.
        headers: end-to-end headers that both legs get.
        client_id: the client's request id, or one made for it; unique only if the client's are.
        stream: whether the answer is streamed.
        local_reason: why it may not be split, None if it may.
        altered: whether `body` differs from `raw`.
    """

    path: str
    method: str
    query: str
    raw: bytes
    body: dict[str, Any]
    headers: CIMultiDict[str]
    client_id: str
    stream: bool = False
    local_reason: str | None = None
    altered: bool = False
    stripped: tuple[str, ...] = ()
    unique: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def chat(self) -> bool:
        """Whether it is a chat request."""
        return self.path == CHAT

    def attempt_id(self, number: int) -> str:
        """Id of one attempt: the same on both its legs, told apart from every other request and attempt."""
        return f"{self.client_id}-{self.unique[:12]}-{number}"

    def plain_body(self) -> bytes:
        """The body for a worker that does it all."""
        return orjson.dumps(self.body) if self.altered else self.raw

    @property
    def max_output_tokens(self) -> int | None:
        """The output limit that the client set, if any."""
        for name in ("max_completion_tokens", "max_tokens"):
            value = self.body.get(name)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
        return None


def forwarded_headers(headers: Mapping[str, str] | CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """End-to-end headers of a client that go to the workers (with credentials and trace context)."""
    named = _named_by_connection(headers.get("Connection", ""))
    found: CIMultiDict[str] = CIMultiDict()
    for name, value in headers.items():
        lower = name.lower()
        if lower not in _NOT_FORWARDED and lower not in named:
            found.add(name, value)
    return found


def answer_headers(
    headers: Mapping[str, str] | CIMultiDictProxy[str], addresses: Iterable[str]
) -> CIMultiDict[str]:
    """End-to-end headers of a worker's answer that go to the client; none that names a worker."""
    named = _named_by_connection(headers.get("Connection", ""))
    found: CIMultiDict[str] = CIMultiDict()
    for name, value in headers.items():
        lower = name.lower()
        if (
            lower in HOP_BY_HOP
            or lower in named
            or lower in {"content-length", "content-encoding", "x-request-id"}
        ):
            continue
        if lower == "location" or any(address in value for address in addresses):
            continue
        found.add(name, value)
    return found


def _named_by_connection(value: str) -> set[str]:
    return {part.strip().lower() for part in value.split(",")} if value else set()


def request_id(given: str | None) -> str:
    """The client's id if it is a fit one, else a new one."""
    if given is not None and _REQUEST_ID.fullmatch(given):
        return given
    return uuid.uuid4().hex


def parse_json(raw: bytes) -> dict[str, Any]:
    """The JSON object of a body.

    Raises:
        ClientError: 400.
    """
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise ClientError(400, f"the body is not valid JSON: {error}", "invalid_json") from None
    if not isinstance(body, dict):
        raise ClientError(400, f"the body must be a JSON object, found {type(body).__name__}", "invalid_body")
    return body


def strip_fields(body: dict[str, Any]) -> tuple[str, ...]:
    """Remove the fields of `STRIPPED_FIELDS` and `STRIPPED_NVEXT` from a body; gives their names."""
    found = [name for name in STRIPPED_FIELDS if name in body]
    for name in found:
        del body[name]
    hints = body.get("nvext")
    if isinstance(hints, dict):
        for name in STRIPPED_NVEXT:
            if name in hints:
                del hints[name]
                found.append(f"nvext.{name}")
    return tuple(found)


def why_local(body: dict[str, Any], chat: bool) -> str | None:
    """Why a request on a two-leg route may not be split; None if it may. The reasons are metric labels."""
    for name in ("n", "best_of"):
        value = body.get(name)
        if value is not None and value != 1:
            return name
    if body.get("use_beam_search"):
        return "beam_search"
    for name in ("echo", "prompt_logprobs", "prompt_embeds"):
        if body.get(name) not in (None, False):
            return name
    if chat:
        return "multimodal" if _multimodal(body.get("messages")) else None
    prompt = body.get("prompt")
    if isinstance(prompt, list) and not (prompt and _all_ids(prompt)):
        return "prompt_list"
    if prompt is not None and not isinstance(prompt, str | list):
        return "prompt_type"
    return None


def _all_ids(prompt: list[Any]) -> bool:
    return all(type(token) is int and 0 <= token < 2**31 for token in prompt)


def _multimodal(messages: Any) -> bool:
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and part.get("type") not in {"text", None, "refusal", "thinking"}:
                return True
    return False


def prefill_body(job: Job, extra: Mapping[str, Any]) -> bytes:
    """The body of a prefill leg: one token, not streamed, with the fields of the hand-over.

    Every name of the output limit is clamped, since an API may prefer any of them; minima and stream options go.
    """
    body = dict(job.body)
    for name in ("stream_options", "min_tokens", "min_completion_tokens"):
        body.pop(name, None)
    body["stream"] = False
    body["max_tokens"] = 1
    for name in OUTPUT_LIMITS[1:]:
        if name in body:
            body[name] = 1
    body.update(extra)
    return orjson.dumps(body)


def with_fields(job: Job, extra: Mapping[str, Any]) -> bytes:
    """The client's body with fields of the hand-over."""
    return orjson.dumps({**job.body, **extra})


# ------------------------------------------------------------------ answers


def scrub(text: str, addresses: Iterable[str]) -> str:
    """A text for a client without addresses of workers."""
    for address in addresses:
        if address in text:
            text = text.replace(address, "worker")
    return text


def merge_usage(usage: Any, cached_tokens: int | None) -> bool:
    """Put the cached tokens that the prefill leg reported into a usage object; whether it changed."""
    if not isinstance(usage, dict) or cached_tokens is None:
        return False
    details = usage.get("prompt_tokens_details")
    if isinstance(details, dict):
        if details.get("cached_tokens") == cached_tokens:
            return False
        usage["prompt_tokens_details"] = {**details, "cached_tokens": cached_tokens}
    else:
        usage["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
    return True


def cached_tokens_of(answer: Mapping[str, Any]) -> int | None:
    """Cached prompt tokens that an answer reports, or None."""
    usage = answer.get("usage")
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return cached if type(cached) is int else None


def prompt_tokens_of(answer: Mapping[str, Any]) -> int | None:
    """Prompt tokens that an answer reports, or None."""
    usage = answer.get("usage")
    tokens = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    return tokens if type(tokens) is int else None
