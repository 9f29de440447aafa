"""Reads the counters of a guest's NICs from the host's ends of the NICs' links, without the bus.

Some links have no end in the host's namespace, for example with macvtap. Their NICs are left out.
"""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from virtbus.schemas.nic import NICS_MAX
from virtbus.schemas.nic_names import host_link

_RESULT_BYTES = 64 * 1024
DIRECTIONS = {"receive": "tx", "transmit": "rx"}
"""By direction in the guest's view: the direction at the host's end of the link."""
KINDS = ("bytes", "packets", "dropped", "errors")


class NicTraffic(NamedTuple):
    """The counters of one NIC. `receive_bytes` counts the bytes that the guest has received."""

    name: str
    counters: dict[str, int]


class GuestTraffic:
    """The NICs of the guests of this node.

    `results` is the folder in which netd stores the results of CNI plugins. A result names the
    links that the plugins made.
    """

    def __init__(self, results: Path, links: Path = Path("/sys/class/net")) -> None:
        self._results = results
        self._links = links

    def of(self, uid: str) -> tuple[NicTraffic, ...]:
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
        """Return the name of netd's link for a NIC of the VM; empty if netd made no such link.

        The name contains only a hash of the uid, which another VM may share. So the link's alias
        must equal the uid.
        """
        own = host_link(uid, index)
        with suppress(OSError, ValueError):
            if (self._links / own / "ifalias").read_text(encoding="utf-8").strip() == uid:
                return own
        return ""


def _of_plugins(path: Path | None) -> str:
    """Return the name of the host's end of a NIC's link, from a result of CNI plugins.

    The host's end is the last link without a namespace in the result. Return an empty text if the
    result has no such link.
    """
    stored: Any = None
    if path is not None:
        with suppress(OSError, ValueError), path.open("rb") as file:
            stored = json.loads(file.read(_RESULT_BYTES))
    links = stored.get("result", {}).get("interfaces", []) if isinstance(stored, dict) else []
    names = [str(one.get("name")) for one in links if not one.get("sandbox")]
    return names[-1] if names and "/" not in names[-1] else ""


def _read(link: Path) -> dict[str, int]:
    """Return the counters of a link.

    Raises OSError, ValueError.
    """
    return {
        f"{direction}_{kind}": int((link / "statistics" / f"{side}_{kind}").read_text("ascii"))
        for direction, side in DIRECTIONS.items()
        for kind in KINDS
    }
