"""Reads the figures of bench, storm and load, and defines which of them are judged."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tests.compare.ratios import Better

OURS = ("controller", "imaged", "netd", "nodeagent")
LOWER, HIGHER, TOLD = Better.LOWER, Better.HIGHER, Better.TOLD
RULES: tuple[tuple[str, Better], ...] = (
    (r"bench: memory per VM", TOLD),
    (r"bench: ", LOWER),
    (r"storm: (starts|creates)\.per_s", HIGHER),
    (r"storm: starts\.cpu_ms_per_vm\.(ours|nats-server)", LOWER),
    # Some take a millisecond; their sum is judged.
    (r"storm: starts\.cpu_ms_per_vm\.", TOLD),
    (r"load: creates\.(accepted|running)_per_s", HIGHER),
    (r"load: (creates|deletes)\.cpu_ms_per_vm\.client", TOLD),
    (r"load: (creates|deletes)\.(cpu_ms|bus)_per_vm\.", LOWER),
    (r"load: creates\.(accepted_ms\.p50|running_ms\.p50|running_ms\.p95)", LOWER),
    (r"load: creates\.(status_puts_per_vm|facts_per_vm|pss_mib\..*)", LOWER),
    (r"load: creates\.pss_kib_per_vm\.controller", LOWER),
    (r"load: deletes\.gone_per_s", HIGHER),
    (r"load: deletes\.gone_ms\.p50", LOWER),
    (r"load: churn\.controller_synced_s", LOWER),
    (r"load: churn\.(running_ms|gone_ms)\.p50", LOWER),
    (r"instructions: .*\.million_per_vm\.", LOWER),
)
"""The first match decides. A value without a match is no figure: a size, a count, a maximum.

All trees find the same machine in a round. So times and rates are compared directly. Ratios to a
floor would add the noise of that floor.
"""


def better_of(name: str) -> Better | None:
    """Return None for a value that is no figure."""
    return next((better for pattern, better in RULES if re.match(pattern, name)), None)


def read(source: str, lines: Sequence[str]) -> dict[str, float]:
    """Return figures by name, from the JSON lines of bench, storm or load."""
    found: dict[str, float] = {}
    for line in lines:
        values = json.loads(line)
        if "name" in values:
            found[f"{source}: {values['name']}"] = float(values["value"])
        else:
            head = f"{source}: {values.pop('figure')}"
            found |= dict(_numbers(head, _with_ours(values)))
    return {name: value for name, value in found.items() if better_of(name) is not None}


def read_all(lines: Mapping[str, Sequence[str]]) -> dict[str, float]:
    """Return the figures of lines by their source."""
    return {
        name: value for source, some in lines.items() for name, value in read(source, some).items()
    }


def _with_ours(values: dict[str, Any]) -> dict[str, Any]:
    cpu = values.get("cpu_ms_per_vm", {})
    if set(OURS) <= cpu.keys():
        return values | {"cpu_ms_per_vm": cpu | {"ours": sum(cpu[name] for name in OURS)}}
    return values


def _numbers(head: str, values: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _numbers(f"{head}.{name}", value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{head}.{name}", float(value)
