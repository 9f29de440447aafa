"""Memo of each host bridge, with the host's forwarding from before the first bridge."""

import json
from pathlib import Path
from typing import TypedDict

from virtbus.netd.edge.whole_file import replace
from virtbus.schemas.network_object import NetworkTarget

_PREFIX = "host"
"""The prefix of all memo files of a netd, which are in one folder."""


class Forwarding(TypedDict):
    """The values of sysctls: the host's forwarding of IPv4 and IPv6, and `accept_ra`.

    `forwarding6` is empty if unknown. `accept_ra` has the value of each interface that accepts
    router advertisements, by the interface's name.
    """

    ip_forward: str
    forwarding6: str
    accept_ra: dict[str, str]


class BridgeMemo:
    """The memo file of one bridge."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def exists(self) -> bool:
        """Return True while resources of the host side may exist."""
        return self._path.exists()

    def write(self, forwarding: Forwarding, target: NetworkTarget | None) -> None:
        """Write the memo, if it does not exist yet.

        The values must be from before the first bridge. If another bridge of this netd has a memo,
        its values are copied. Otherwise `forwarding` is stored.
        """
        if self.exists():
            return
        before = next((_forwarding(one) for one in self.all()), forwarding)
        plain = target.model_dump(mode="json") if target is not None else None
        replace(self._path, json.dumps({**before, "target": plain}).encode())

    def forwarding(self) -> Forwarding:
        return _forwarding(self._path)

    def forget(self) -> None:
        """Remove the memo, after all resources of its bridge were removed."""
        self._path.unlink()

    def beside(self, name: str) -> Path:
        return self._path.with_name(f"{_PREFIX}-{name}.json")

    def all(self) -> list[Path]:
        return sorted(self._path.parent.glob(f"{_PREFIX}*.json"))


def _forwarding(path: Path) -> Forwarding:
    plain = json.loads(path.read_text())
    return Forwarding(
        ip_forward=str(plain["ip_forward"]),
        forwarding6=str(plain.get("forwarding6", "")),
        accept_ra={str(key): str(value) for key, value in plain.get("accept_ra", {}).items()},
    )


def target_in(path: Path) -> NetworkTarget | None:
    """Return the network object in a memo; None for the built-in network.

    Raises:
        ValueError: the file is not a memo.
    """
    plain = json.loads(path.read_text()).get("target")
    return NetworkTarget.model_validate(plain) if plain is not None else None
