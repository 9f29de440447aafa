"""Stores the addresses of hosts closed to guests, so that netd can start without the bus."""

import json
import logging
from collections.abc import Collection
from pathlib import Path

from virtbus.netd.edge.whole_file import replace

log = logging.getLogger(__name__)


class HostsFile:
    """The file `<state_dir>/netd/reach/hosts.json`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written: list[str] | None = None

    def read(self) -> list[str]:
        try:
            found = json.loads(self._path.read_text())
            return [text for text in found if isinstance(text, str)]
        except FileNotFoundError:
            return []
        except (ValueError, TypeError) as error:
            extra = {"code": "bad_hosts_file"}
            log.error("%s cannot be used (%s); the bus repeats it", self._path, error, extra=extra)
            return []

    def write(self, addresses: Collection[object]) -> None:
        texts = sorted(map(str, addresses))
        if texts == self._written:
            return
        self._path.parent.mkdir(exist_ok=True)
        replace(self._path, json.dumps(texts).encode())
        self._written = texts
