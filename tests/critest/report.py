"""Reads critest's report, and the table of excluded specs in docs/reference/cri.md."""

import re
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.kubernetes.cluster import ROOT

PAGE = ROOT / "docs" / "reference" / "cri.md"
HEADING = "## Specs of critest without a meaning"
BOUND = 0.9
"""The part of the specs with a meaning that must pass."""

Results = dict[str, str]
"""The name of each spec → `passed`, `failed` or `skipped`."""


def results(report: Path) -> Results:
    """Return the results of a JUnit report."""
    found: Results = {}
    for case in ET.parse(report).getroot().iter("testcase"):
        name, status = case.get("name", ""), case.get("status", "")
        if name.startswith("[It] "):
            found[name.removeprefix("[It] ").removeprefix("[k8s.io] ")] = status
    return found


def excluded() -> dict[str, str]:
    """Return the beginnings of excluded names in the page's table, each with its cause."""
    section = PAGE.read_text().partition(f"{HEADING}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([^`]+)` \| (.+) \|$", section, re.MULTILINE)
    assert rows, f"{PAGE} has no table below {HEADING!r}"
    return dict(rows)


def compared(containers: Results, vms: Results, without: Iterable[str]) -> tuple[float, str]:
    """Return the part of the specs with a meaning that VMs pass, and a report as text."""
    left_out = tuple(without)
    lines, passed, counted = [], 0, 0
    for name in sorted(one for one, status in containers.items() if status == "passed"):
        if any(part in name for part in left_out):
            lines.append(f"  no meaning  {name}")
            continue
        counted += 1
        status = vms.get(name, "missing")
        passed += status == "passed"
        lines.append(f"  {status:<10}  {name}")
    part = passed / counted if counted else 0.0
    head = f"VMs pass {passed} of {counted} specs that containers pass: {part:.0%}"
    return part, "\n".join([head, *lines])


def summary(runtime: str, found: Mapping[str, str]) -> str:
    """Return the number of specs by status."""
    counts = {status: list(found.values()).count(status) for status in sorted(set(found.values()))}
    return f"{runtime}: {counts}"
