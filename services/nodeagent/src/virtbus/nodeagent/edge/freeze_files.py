"""Stores the freezes of guests in `<state_dir>/vms/<uid>/frozen`."""

import json
import logging
from collections.abc import Callable
from pathlib import Path

from virtbus.nodeagent.core.freezes import Frozen
from virtbus.nodeagent.edge.atomic_file import in_thread, replace, sync_dir, writing
from virtbus.schemas.ids import check_uid, is_uid

log = logging.getLogger(__name__)

FROZEN = "frozen"


class DiskFreezes:
    """The `FreezeFiles` port."""

    def __init__(self, vms: Path) -> None:
        self._vms = vms

    async def keep(self, uid: str, frozen: Frozen) -> None:
        data = json.dumps({"since_ns": frozen.since_ns, "until_ns": frozen.until_ns}).encode()
        path = self._vms / check_uid(uid) / FROZEN
        with writing(self._vms):
            await in_thread(lambda: replace(path, data))

    async def forget(self, uid: str) -> None:
        path = self._vms / check_uid(uid) / FROZEN

        def remove() -> None:
            path.unlink()
            sync_dir(path.parent)

        await _logged(remove)

    async def all(self) -> dict[str, Frozen]:
        return await in_thread(self._read_all)

    def _read_all(self) -> dict[str, Frozen]:
        found = {}
        for path in sorted(self._vms.glob(f"*/{FROZEN}")):
            if is_uid(path.parent.name):
                found[path.parent.name] = _read(path)
        return found


def _read(path: Path) -> Frozen:
    """Return the freeze in a file. An unreadable file gives the deadline 0."""
    try:
        data = json.loads(path.read_bytes())
        return Frozen(int(data["since_ns"]), int(data["until_ns"]))
    except (OSError, ValueError, TypeError, KeyError) as error:
        log.error("unreadable %s: %s", path, error, extra={"code": "bad_freeze_file"})
        return Frozen(0, 0)


async def _logged(work: Callable[[], None]) -> None:
    """Run `work` in a thread, and only log its error: a left file merely costs another thaw."""
    try:
        await in_thread(work)
    except FileNotFoundError:
        return
    except OSError as error:
        log.warning("cannot remove: %s", error, extra={"code": "state_write"})
