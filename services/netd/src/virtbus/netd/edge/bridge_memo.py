"""Remembers a host bridge that may exist, and `ip_forward` as it was before the first one."""

import json
from pathlib import Path

from virtbus.schemas.network_object import NetworkTarget

_PREFIX = "host"
"""The beginning of the names of all memos of a netd, which are in one folder."""


class BridgeMemo:
    """The memo file of one bridge."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def exists(self) -> bool:
        """Return True while parts of the host side may exist."""
        return self._path.exists()

    def write(self, ip_forward: str, target: NetworkTarget | None) -> None:
        """Write the memo unless it exists; `ip_forward` counts only for the first bridge."""
        if self.exists():
            return
        before = next((_forward(one) for one in self.all()), ip_forward)
        plain = target.model_dump(mode="json") if target is not None else None
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps({"ip_forward": before, "target": plain}))
        part.replace(self._path)

    def ip_forward(self) -> str:
        """Return the former `ip_forward`."""
        return _forward(self._path)

    def forget(self) -> None:
        """Remove the memo, after all parts of its bridge were removed."""
        self._path.unlink()

    def beside(self, name: str) -> Path:
        """Return the memo file of another bridge of this netd."""
        return self._path.with_name(f"{_PREFIX}-{name}.json")

    def all(self) -> list[Path]:
        """Return the memos of all bridges of this netd that may exist."""
        return sorted(self._path.parent.glob(f"{_PREFIX}*.json"))


def _forward(path: Path) -> str:
    return str(json.loads(path.read_text())["ip_forward"])


def target_in(path: Path) -> NetworkTarget | None:
    """Return the network object in a memo; None for the built-in network.

    Raises:
        ValueError: it is no memo.
    """
    plain = json.loads(path.read_text()).get("target")
    return NetworkTarget.model_validate(plain) if plain is not None else None
