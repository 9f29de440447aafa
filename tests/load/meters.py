"""Measures the cost of a run: CPU and memory by process, traffic on the bus, percentiles."""

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_CPUCLOCK_SCHED = 2
"""clock_getcpuclockid(3): another process's CPU clock."""


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process, ended threads included."""
    return time.clock_gettime(~pid << 3 | _CPUCLOCK_SCHED)


def memory_kib(pid: int, what: str = "Pss") -> int:
    """Return the proportional (Pss) or resident (Rss) set size."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith(f"{what}:"))


def descriptors(pid: int) -> int:
    """Return the number of open files of a process."""
    return len(os.listdir(f"/proc/{pid}/fd"))


@dataclass(frozen=True)
class Reading:
    """All meters at one moment."""

    at_s: float
    cpu_s: Mapping[str, float]
    pss_kib: Mapping[str, int]
    bus: Mapping[str, int]

    def since(self, earlier: "Reading", vms: int) -> dict[str, Any]:
        """Return the cost per VM of `vms` creates or deletes between two readings."""
        return {
            "seconds": round(self.at_s - earlier.at_s, 2),
            "cpu_ms_per_vm": {
                name: round((spent - earlier.cpu_s.get(name, 0.0)) * 1000 / vms, 2)
                for name, spent in self.cpu_s.items()
            },
            "bus_per_vm": {
                name: round((count - earlier.bus[name]) / vms, 1)
                for name, count in self.bus.items()
            },
        }


def percentiles(values_s: Sequence[float]) -> dict[str, float]:
    """Return p50, p95, p99 and the maximum, in milliseconds."""
    if not values_s:
        return {}
    ordered = sorted(values_s)

    def at(share: float) -> float:
        return round(ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)] * 1000, 1)

    return {"p50": at(0.5), "p95": at(0.95), "p99": at(0.99), "max": at(1.0)}


def line(figure: str, **values: Any) -> str:
    """Format one figure as a line of JSON."""
    return json.dumps({"figure": figure, **values})
