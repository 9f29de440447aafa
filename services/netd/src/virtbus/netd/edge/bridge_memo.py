"""Stores a memo of each host bridge, with the host's forwarding from before the first bridge."""

import json
from pathlib import Path
from typing import TypedDict

from virtbus.schemas.network_object import NetworkTarget

_PREFIX = "host"
"""The beginning of the names of all memos of a netd, which are in one folder."""


class Forwarding(TypedDict):
    """The values of sysctls: the host's forwarding of IPv4 and IPv6, and `accept_ra`.

    `forwarding6` is empty if it is unknown. `accept_ra` has, by name, the value of each interface
    that accepts router advertisements.
    """

    ip_forward: str
    forwarding6: str
    accept_ra: dict[str, str]


class BridgeMemo:
    """The memo file of one bridge."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def exists(self) -> bool:
        """Return True while parts of the host side may exist."""
        return self._path.exists()

    def write(self, forwarding: Forwarding, target: NetworkTarget | None) -> None:
        """Write the memo unless it exists.

        If another bridge of this netd has a memo, the values in that memo are copied, because they
        are from before the first bridge. Otherwise `forwarding` is stored.
        """
        if self.exists():
            return
        before = next((_forwarding(one) for one in self.all()), forwarding)
        plain = target.model_dump(mode="json") if target is not None else None
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps({**before, "target": plain}))
        part.replace(self._path)

    def forwarding(self) -> Forwarding:
        """Return the values from before the first bridge."""
        return _forwarding(self._path)

    def forget(self) -> None:
        """Remove the memo, after all parts of its bridge were removed."""
        self._path.unlink()

    def beside(self, name: str) -> Path:
        """Return the memo file of another bridge of this netd."""
        return self._path.with_name(f"{_PREFIX}-{name}.json")

    def all(self) -> list[Path]:
        """Return the memos of all bridges of this netd that may exist."""
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
