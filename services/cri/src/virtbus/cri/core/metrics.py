"""Builds CRI's metrics of pods from the statistics of their containers.

The names and labels equal those of containerd: both runtimes may be behind one criproxy, and
kubelet keeps only one description for each name. A metric without a known value is left out.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

Plain = dict[str, Any]
COUNTER, GAUGE = "COUNTER", "GAUGE"
LABELS = ("id", "name")
_NANO = 10**9


class Metric(NamedTuple):
    """A metric: its description, and a function that reads its value from a container's statistics.

    For an unknown value, the function returns None.
    """

    name: str
    help: str
    kind: str
    value: Callable[[Plain], int | None]
    more: tuple[tuple[str, str], ...] = ()
    """Labels in addition to LABELS, with their values."""


def _cpu_seconds(stats: Plain) -> int | None:
    cpu_ns = _value(stats, "cpu", "usage_core_nano_seconds")
    return None if cpu_ns is None else cpu_ns // _NANO


def _value(stats: Plain, part: str, name: str) -> int | None:
    found: int | None = stats.get(part, {}).get(name, {}).get("value")
    return found


METRICS = (
    Metric(
        "container_cpu_usage_seconds_total",
        "CPU time of the guest's emulator in whole seconds.",
        COUNTER,
        _cpu_seconds,
    ),
    Metric(
        "container_memory_usage_bytes",
        "Resident memory of the guest's emulator in bytes.",
        GAUGE,
        lambda stats: _value(stats, "memory", "usage_bytes"),
    ),
    Metric(
        "container_memory_working_set_bytes",
        "Memory that the node cannot take back from the guest, in bytes.",
        GAUGE,
        lambda stats: _value(stats, "memory", "working_set_bytes"),
    ),
    Metric(
        "container_memory_rss",
        "Resident memory of the guest's emulator in bytes.",
        GAUGE,
        lambda stats: _value(stats, "memory", "rss_bytes"),
    ),
    Metric(
        "container_fs_usage_bytes",
        "Size of the files of the VM's disks in bytes.",
        GAUGE,
        lambda stats: _value(stats, "writable_layer", "used_bytes"),
        (("device", "disks"),),
    ),
)


NETWORK = {
    f"container_network_{direction}_{kind}_total": (f"{direction}_{counter}", what)
    for direction in ("receive", "transmit")
    for kind, counter, what in (
        ("bytes", "bytes", "Bytes"),
        ("packets", "packets", "Packets"),
        ("packets_dropped", "dropped", "Dropped packets"),
        ("errors", "errors", "Errors"),
    )
}
"""By name of a metric of a pod's NICs: the name of its counter, and the counted unit.

`receive` is the direction to the guest.
"""


def descriptors() -> list[Plain]:
    """Return the descriptions of all metrics in the shape of ListMetricDescriptors."""
    network = [
        {"name": name, "help": f"{what} of a guest's NIC.", "label_keys": [*LABELS, "interface"]}
        for name, (_, what) in NETWORK.items()
    ]
    return network + [
        {
            "name": one.name,
            "help": one.help,
            "label_keys": [*LABELS, *(key for key, _ in one.more)],
        }
        for one in METRICS
    ]


def of_sandbox(
    stats: Plain, nics: Sequence[tuple[str, Mapping[str, int]]], *, now_ns: int
) -> Plain:
    """Return a sandbox's metrics in the shape of ListPodSandboxMetrics.

    `nics` has the name and the counters of each NIC.
    """
    containers = [
        {"container_id": one["attributes"]["id"], "metrics": list(_metrics(one))}
        for one in stats["linux"]["containers"]
    ]
    about = stats["attributes"]
    network = [
        {
            "name": name,
            "timestamp": now_ns,
            "metric_type": COUNTER,
            "label_values": [about["id"], about["metadata"]["name"], nic],
            "value": {"value": counters[counter]},
        }
        for nic, counters in nics
        for name, (counter, _) in NETWORK.items()
    ]
    return {"pod_sandbox_id": about["id"], "metrics": network, "container_metrics": containers}


def _metrics(stats: Plain) -> Iterator[Plain]:
    attributes = stats["attributes"]
    for one in METRICS:
        value = one.value(stats)
        if value is not None:
            labels = [attributes["id"], attributes["metadata"]["name"]]
            yield {
                "name": one.name,
                "timestamp": _timestamp_ns(stats),
                "metric_type": one.kind,
                "label_values": [*labels, *(text for _, text in one.more)],
                "value": {"value": value},
            }


def _timestamp_ns(stats: Plain) -> int:
    parts: Iterator[Plain] = (part for part in stats.values() if isinstance(part, dict))
    found: int = max(part.get("timestamp", 0) for part in parts)
    return found
