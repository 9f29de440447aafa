"""Limits the labels and capacity of a node to approved values before placement uses them.

Anyone with a node's credentials can write its heartbeat. Without this limit, a thief could attract
VMs and their secrets by false labels or a false size (ADR 0031).
"""

from collections.abc import Iterator

from virtbus.controller.core.demand import HOSTNAME
from virtbus.schemas.hosts import Approved, HostRecord
from virtbus.schemas.node import NodeRecord
from virtbus.schemas.quantity import format_bytes

SLACK = 1.02
"""Growth up to this factor is not reported, because kernels count a host's memory differently."""


def approval(record: NodeRecord) -> Approved:
    """Return a heartbeat's capacity and labels, without the host name, as approved values."""
    labels = {key: value for key, value in record.labels.items() if key != HOSTNAME}
    return Approved(
        labels=labels,
        cpus=record.cpus,
        memory_bytes=record.memory_bytes,
        disk_bytes=record.disk_bytes,
    )


def offered(record: NodeRecord, host: HostRecord | None) -> NodeRecord:
    """Return the heartbeat limited to approved values, for placement.

    The label of the host name is kept only if its value is the node's own name.
    """
    approved = _limits(host)
    labels = {
        key: value
        for key, value in record.labels.items()
        if (value == record.node if key == HOSTNAME else _allowed(approved, key, value))
    }
    if approved is None:
        return record if labels == record.labels else record.model_copy(update={"labels": labels})
    least = {
        "labels": labels,
        "cpus": min(record.cpus, approved.cpus),
        "memory_bytes": min(record.memory_bytes, approved.memory_bytes),
    }
    if approved.disk_bytes:
        least["disk_free_bytes"] = min(record.disk_free_bytes, approved.disk_bytes)
    return record.model_copy(update=least)


def beyond(record: NodeRecord, host: HostRecord | None) -> tuple[str, ...]:
    """Return a text for each reported value beyond its approved value."""
    return tuple(_beyond(record, _limits(host)))


def _beyond(record: NodeRecord, approved: Approved | None) -> Iterator[str]:
    for key, value in sorted(record.labels.items()):
        if key == HOSTNAME and value != record.node:
            yield f"label {key}={value}, which is not its name"
        elif key != HOSTNAME and not _allowed(approved, key, value):
            yield f"label {key}={value}"
    if approved is None:
        return
    if record.cpus > approved.cpus:
        yield f"{record.cpus} CPUs, {approved.cpus} approved"
    for what, there, may in (
        ("memory", record.memory_bytes, approved.memory_bytes),
        ("disk", record.disk_bytes, approved.disk_bytes),
    ):
        if there > may * SLACK:
            yield f"{format_bytes(there)} of {what}, {format_bytes(may)} approved"


def _limits(host: HostRecord | None) -> Approved | None:
    return None if host is None or host.trusted else host.approved


def _allowed(approved: Approved | None, key: str, value: str) -> bool:
    return approved is None or approved.labels.get(key) == value
