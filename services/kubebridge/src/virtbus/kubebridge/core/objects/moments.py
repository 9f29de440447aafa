"""Formats and parses Kubernetes' times (RFC 3339, UTC), and merges conditions that carry them."""

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, NamedTuple

from virtbus.kubebridge.core.objects.plain import Object
from virtbus.kubebridge.core.objects.typed import Condition


def stamp(now: datetime) -> str:
    """Format a time as Kubernetes does."""
    return now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def micro_stamp(now: datetime) -> str:
    """Format a MicroTime, as Events and Leases have it."""
    return now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class Said(NamedTuple):
    """A condition before it is written."""

    type: str
    on: bool
    reason: str = ""
    message: str = ""
    probed: str = ""


def merged(
    said: Iterable[Said], before: Iterable[Condition], now: datetime
) -> tuple[list[Any], str]:
    """Return conditions with times, and the time. An unchanged status keeps its transition time."""
    at = stamp(now)
    known = {one.type: one for one in before}
    result = []
    for one in said:
        old, status = known.get(one.type), str(one.on)
        since = old.since if old is not None and old.status == status else ""
        texts = {"reason": one.reason, "message": one.message, "lastProbeTime": one.probed}
        result.append(
            {"type": one.type, "status": status}
            | {name: value for name, value in texts.items() if value}
            | {"lastTransitionTime": since or at}
        )
    return result, at


def find(conditions: Iterable[Object], kind: str) -> Object:
    """Return the condition of a type, or an empty one."""
    return next((one for one in conditions if one.get("type") == kind), {})
