"""Approval of nodes: unapproved labels and capacity attract no VM.

A node's credentials write its heartbeat. A stolen credential could otherwise attract VMs, and their
secrets, by false labels or a false size (ADR 0031).
"""

from collections.abc import Iterator

from virtbus.controller.core.placement import HOSTNAME
from virtbus.schemas.hosts import Approved, HostRecord
from virtbus.schemas.node import NodeRecord
from virtbus.schemas.quantity import format_bytes

SLACK = 1.02
"""Growth below this factor is ignored: kernels count a host's memory differently."""


def approval(record: NodeRecord) -> Approved:
    """Return the approval of a node's first heartbeat."""
    labels = {key: value for key, value in record.labels.items() if key != HOSTNAME}
    return Approved(
        labels=labels,
        cpus=record.cpus,
        memory_bytes=record.memory_bytes,
        disk_bytes=record.disk_bytes,
    )


def offered(record: NodeRecord, host: HostRecord | None) -> NodeRecord:
    """Return the node as placement sees it; a node's name is always its own."""
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
    """Return the unapproved part of a report, for people."""
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
