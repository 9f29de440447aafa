"""Builds CRI's statistics of containers and sandboxes, as plain values with CRI's field names.

The CPU time and memory are those of the guest's emulator. Memory that the guest holds counts as its
working set, because the node cannot take it back. A value that is unknown is left out.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from virtbus.cri.core.pod import Container, Sandbox

Plain = dict[str, Any]


def container(
    one: Container, cpu_ns: int | None, memory_bytes: int | None, *, now_ns: int
) -> Plain:
    """Return the statistics of a container without those of its disks."""
    attributes = {
        "id": one.id,
        "metadata": one.config.metadata.model_dump(),
        "labels": one.config.labels,
        "annotations": one.config.annotations,
    }
    return {"attributes": attributes, **_usage(cpu_ns, memory_bytes, now_ns)}


def with_disk(stats: Plain, folder: str, disk_bytes: int | None, *, now_ns: int) -> Plain:
    """Return the statistics of a container, with the VM's disks as its writable layer.

    `folder` is the node's folder of the disks. Without a known size, the statistics are unchanged.
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
    """Return the statistics of a sandbox, with those of its NICs. The first NIC has its address.

    `nics` has the name and the counters of each NIC. A counter has a name such as `receive_bytes`
    for the bytes that the guest has received.
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
