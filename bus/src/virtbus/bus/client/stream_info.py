"""Reads extent, fill and replicas of a stream from JetStream's STREAM.INFO."""

from collections.abc import Iterable, Mapping
from typing import Any

from virtbus.bus.client.ports import ConsumerReport, Extent, StreamReport

Info = Mapping[str, Any]


def fill_of(info: Info) -> float:
    """Return the used share of a stream's max_bytes; 0 without a limit."""
    most = int(info["config"].get("max_bytes", -1))
    return int(info["state"]["bytes"]) / most if most > 0 else 0.0


def extent_of(info: Info) -> Extent:
    """Return the first and last sequence of a stream, and its size."""
    state = info["state"]
    return Extent(
        first=int(state["first_seq"]),
        last=int(state["last_seq"]),
        messages=int(state["messages"]),
        bytes=int(state["bytes"]),
        max_bytes=max(0, int(info["config"].get("max_bytes", -1))),
    )


def report_of(info: Info, consumers: Iterable[Info]) -> StreamReport:
    """Return the report of a stream with its consumers."""
    return StreamReport(
        name=info["config"]["name"],
        messages=int(info["state"]["messages"]),
        fill=fill_of(info),
        replicas=int(info["config"]["num_replicas"]),
        consumers=tuple(
            ConsumerReport(one["name"], int(one["num_pending"]), int(one["num_waiting"]))
            for one in consumers
        ),
        current=_current(info),
    )


def _current(info: Info) -> int:
    cluster = info.get("cluster") or {}
    others = cluster.get("replicas") or []
    return 1 + sum(bool(one.get("current")) and not one.get("offline") for one in others)
