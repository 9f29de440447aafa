"""The agent's ports for backups of running guests, over a simulated host's QEMU and libvirt."""

from collections.abc import Collection, Mapping
from typing import TypeVar

from tests.sim.hostports import Threads
from tests.sim.loop import Process
from tests.sim.machine import Domain, Host, Push

from virtbus.nodeagent.core.guest_backups import PushState
from virtbus.nodeagent.core.guest_layers import GuestLayers
from virtbus.nodeagent.edge.libvirt_layers import NoLayers
from virtbus.schemas.backup import BITMAP
from virtbus.schemas.errors import Code, VirtbusError

Result = TypeVar("Result")
PUSH_S = (0.1, 6.0)
TARGETS = [f"{bus}{letter}" for bus in ("vd", "sd") for letter in "abcdefgh"]


class SimLayers(NoLayers):
    """Implements `GuestLayerPort`: each disk is a file of its own, and no guest changes it."""

    def __init__(self, host: Host, process: Process) -> None:
        self._threads = Threads(host, process)

    async def look(self, uid: str) -> GuestLayers | None:
        named = {target: f"/simulated/{target}" for target in TARGETS}
        found = GuestLayers(dict.fromkeys(named.values(), 1), named)
        return await self._threads.on_guest(uid, lambda _guest: found)


class SimBackups:
    """Implements `GuestBackupPort`. QEMU writes on without agent and libvirtd."""

    def __init__(self, host: Host, process: Process) -> None:
        self._host = host
        self._threads = Threads(host, process)

    async def bitmaps(
        self, uid: str, targets: Collection[str], prefix: str = BITMAP, about: str = ""
    ) -> frozenset[str]:
        del targets, prefix, about
        known = self._host.disk.bitmaps
        return (
            await self._threads.on_guest(uid, lambda _: frozenset(known.get(uid, ())))
            or frozenset()
        )

    async def begin(self, uid: str, files: Mapping[str, str], since: str, bitmap: str) -> None:
        del files
        host = self._host

        def run(guest: Domain) -> bool:
            if guest.push is not None and guest.push.state == "running":
                raise _failed("another job runs")
            known = host.disk.bitmaps.setdefault(uid, {})
            if since and since not in known:
                raise _failed(f"there is no bitmap {since}")
            at = host.disk.wrote(uid)
            file = host.staged.get(bitmap.removeprefix(BITMAP))
            push = guest.push = Push(file, known[since] if since else 0, at)
            known[bitmap] = at
            host.later(PUSH_S, lambda: host.pushed(guest, push))
            return True

        if not await self._threads.on_guest(uid, run):
            raise _failed("no guest runs")

    async def progress(self, uid: str) -> PushState:
        def run(guest: Domain) -> PushState:
            return PushState(guest.push.state if guest.push is not None else "lost")

        return await self._threads.on_guest(uid, run) or PushState()

    async def abort(self, uid: str) -> None:
        def run(guest: Domain) -> None:
            if guest.push is not None and guest.push.state == "running":
                guest.push = None

        await self._threads.on_guest(uid, run)

    async def keep_only(
        self, uid: str, bitmaps: Collection[str] | None, drop: str = "", prefix: str = BITMAP
    ) -> None:
        del prefix

        def run(_guest: Domain) -> None:
            known = self._host.disk.bitmaps.get(uid, {})
            for name in list(known):
                if name == drop if bitmaps is None else name not in bitmaps:
                    del known[name]

        await self._threads.on_guest(uid, run)


def _failed(why: str) -> VirtbusError:
    return VirtbusError(Code.INTERNAL, "libvirt_failed", f"begin the backup: {why}")
