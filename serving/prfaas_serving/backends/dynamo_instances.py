"""The instances that a Dynamo frontend knows, as it lists them at `GET /health`.

An instance is a process that serves an endpoint of a component. Its id is an unsigned number of 64 bits, in decimal
here and in the request headers (in hex in a worker's own metrics), and another one after every start. An instance that
died stays listed until its lease ends, some seconds later.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Any

#: The endpoint that requests go to; a component has others, for questions about its cache.
GENERATE = "generate"


@dataclass(frozen=True, slots=True)
class Instance:
    """One instance that requests can be sent to."""

    namespace: str
    component: str
    instance_id: str
    """Decimal digits."""
    address: ipaddress.IPv4Address | ipaddress.IPv6Address | None
    """Where it takes requests; None if it is not said as an address."""


def read_instances(page: Any) -> list[Instance] | None:
    """The instances on a page of `/health` (parsed), in its order; None if it is no such page."""
    listed = page.get("instances") if isinstance(page, dict) else None
    if not isinstance(listed, list):
        return None
    found = []
    for entry in listed:
        if not isinstance(entry, dict) or entry.get("endpoint") != GENERATE:
            continue
        instance_id = entry.get("instance_id")
        if type(instance_id) is not int or instance_id < 0:
            continue
        found.append(
            Instance(
                str(entry.get("namespace")),
                str(entry.get("component")),
                str(instance_id),
                _address(entry.get("transport")),
            )
        )
    return found


def _address(transport: Any) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address in `{"tcp": "host:port/..."}`."""
    place = transport.get("tcp") if isinstance(transport, dict) else None
    if not isinstance(place, str):
        return None
    host = place.partition("/")[0].rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
