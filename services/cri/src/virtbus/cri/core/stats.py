"""Builds CRI's statistics of containers and sandboxes, as plain values with CRI's field names.

The CPU time and memory are those of the guest's emulator. The whole memory of a guest counts as its
working set, because the node cannot take it back. An unknown value is left out.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from virtbus.cri.core.pod import Container, Sandbox

Plain = dict[str, Any]


def container(
    one: Container, cpu_ns: int | None, memory_bytes: int | None, *, now_ns: int
) -> Plain:
    """Return the statistics of a container, without its disks."""
    attributes = {
        "id": one.id,
        "metadata": one.config.metadata.model_dump(),
        "labels": one.config.labels,
        "annotations": one.config.annotations,
    }
    return {"attributes": attributes, **_usage(cpu_ns, memory_bytes, now_ns)}


def with_disk(stats: Plain, folder: str, disk_bytes: int | None, *, now_ns: int) -> Plain:
    """Add the VM's disks to the statistics of a container, as its writable layer.

    `folder` is the node's folder with the disks. `disk_bytes` is None if the size is unknown; then
    the statistics are returned unchanged.
    """
    if disk_bytes is None:
        return stats
    layer = {
        "timestamp": now_ns,
        "fs_id": {"mountpoint": folder},
        "used_bytes": {"value": disk_bytes},
        "inodes_used": {"value": 1},
    }
    return stats | {"writable_layer": layer}


def sandbox(one: Sandbox, containers: list[Plain]) -> Plain:
    """Return the statistics of a sandbox from those of its containers. At most one of them runs."""
    attributes = {
        "id": one.id,
        "metadata": one.config.metadata.model_dump(),
        "labels": one.config.labels,
        "annotations": one.config.annotations,
    }
    whole: Plain = {
        kind: stats[kind] for stats in containers for kind in ("cpu", "memory") if kind in stats
    }
    if "cpu" in whole:  # the emulator runs
        count = {"timestamp": whole["cpu"]["timestamp"], "process_count": {"value": 1}}
        whole["process"] = count
    return {"attributes": attributes, "linux": {**whole, "containers": containers}}


def with_network(
    stats: Plain, nics: Sequence[tuple[str, Mapping[str, int]]], *, now_ns: int
) -> Plain:
    """Add the counters of the NICs to the statistics of a sandbox.

    `nics` has the name and the counters of each NIC; the first NIC has the pod's address. The
    counter `receive_bytes` counts the bytes that the guest has received.
    """
    if not nics:
        return stats
    first, *more = (
        {
            "name": name,
            "rx_bytes": {"value": counters["receive_bytes"]},
            "rx_errors": {"value": counters["receive_errors"]},
            "tx_bytes": {"value": counters["transmit_bytes"]},
            "tx_errors": {"value": counters["transmit_errors"]},
        }
        for name, counters in nics
    )
    network = {"timestamp": now_ns, "default_interface": first, "interfaces": more}
    return stats | {"linux": stats["linux"] | {"network": network}}


def _usage(cpu_ns: int | None, memory_bytes: int | None, now_ns: int) -> Plain:
    usage: Plain = {}
    if cpu_ns is not None:
        usage["cpu"] = {"timestamp": now_ns, "usage_core_nano_seconds": {"value": cpu_ns}}
    if memory_bytes is not None:
        value = {"value": memory_bytes}
        usage["memory"] = {
            "timestamp": now_ns,
            "working_set_bytes": value,
            "usage_bytes": value,
            "rss_bytes": value,
        }
    return usage
