"""Reads the counters of a guest's NICs at the host's ends of their links, without the bus.

A NIC without such an end, as on macvtap, has no counters here.
"""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from virtbus.schemas.nic import NICS_MAX
from virtbus.schemas.nic_names import host_link

_RESULT_BYTES = 64 * 1024
DIRECTIONS = {"receive": "tx", "transmit": "rx"}
"""The guest's direction, and that of the host's end."""
KINDS = ("bytes", "packets", "dropped", "errors")


class NicTraffic(NamedTuple):
    """The counters of one NIC, by the guest's direction and kind, such as `receive_bytes`."""

    name: str
    counters: dict[str, int]


class GuestTraffic:
    """The NICs of the guests of this node.

    `results` is the folder in which netd stores the results of CNI plugins, which name their links.
    """

    def __init__(self, results: Path, links: Path = Path("/sys/class/net")) -> None:
        self._results = results
        self._links = links

    def of(self, uid: str) -> tuple[NicTraffic, ...]:
        """Return the counters of a VM's NICs, in the order of its interfaces."""
        found = []
        results = {
            path.name.rpartition("-")[2]: path for path in self._results.glob(f"*-{uid}-eth*")
        }
        for index in range(NICS_MAX):
            link = self._own(uid, index) or _of_plugins(results.get(f"eth{index}"))
            with suppress(OSError, ValueError):
                if link:
                    found.append(NicTraffic(f"eth{index}", _read(self._links / link)))
        return tuple(found)

    def _own(self, uid: str, index: int) -> str:
        """Return netd's link of the VM, or nothing. The alias excludes a VM with the same hash."""
        own = host_link(uid, index)
        with suppress(OSError, ValueError):
            if (self._links / own / "ifalias").read_text(encoding="utf-8").strip() == uid:
                return own
        return ""


def _of_plugins(path: Path | None) -> str:
    """Return the host's end in a result of CNI plugins: the last link outside of the namespace."""
    stored: Any = None
    if path is not None:
        with suppress(OSError, ValueError), path.open("rb") as file:
            stored = json.loads(file.read(_RESULT_BYTES))
    links = stored.get("result", {}).get("interfaces", []) if isinstance(stored, dict) else []
    names = [str(one.get("name")) for one in links if not one.get("sandbox")]
    return names[-1] if names and "/" not in names[-1] else ""


def _read(link: Path) -> dict[str, int]:
    """Return the counters of a link; raises OSError, ValueError."""
    return {
        f"{direction}_{kind}": int((link / "statistics" / f"{side}_{kind}").read_text("ascii"))
        for direction, side in DIRECTIONS.items()
        for kind in KINDS
    }
