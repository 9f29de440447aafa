"""Formats and parses Kubernetes' times (RFC 3339, UTC), and merges conditions that carry them."""

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from virtbus.kubebridge.core.objects.plain import Object, text


def stamp(now: datetime) -> str:
    """Format a time as Kubernetes does."""
    return now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def micro_stamp(now: datetime) -> str:
    """Format a MicroTime, as Events and Leases have it."""
    return now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def moment(value: str) -> datetime | None:
    """Parse a time. Return None if it is invalid."""
    try:
        return datetime.fromisoformat(value).astimezone(UTC)
    except (ValueError, OverflowError):  # the time is out of range in UTC
        return None


def condition(kind: str, *, on: bool, reason: str = "", message: str = "") -> dict[str, Any]:
    """Return a condition without its times."""
    said = {"type": kind, "status": "True" if on else "False"}
    if reason:
        said["reason"] = reason
    if message:
        said["message"] = message
    return said


def merged(wanted: Iterable[dict[str, Any]], before: list[Object], now: str) -> list[Any]:
    """Add times to the conditions. If the status is unchanged, so is the transition time."""
    known = {text(one, "type"): one for one in before}
    result = []
    for one in wanted:
        old = known.get(one["type"])
        since = now
        if old is not None and old.get("status") == one["status"]:
            since = text(old, "lastTransitionTime") or now
        result.append({**one, "lastTransitionTime": since})
    return result


def find(conditions: Iterable[Object], kind: str) -> Object:
    """Return the condition of a type, or an empty one."""
    return next((one for one in conditions if one.get("type") == kind), {})
