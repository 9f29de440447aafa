"""Does the duties of a node: work that no call waits for, done when the bus answers.

Duties delete VMs that no pod needs, power off the records of VMs whose guests have ended, and
release networks that no sandbox needs. After an outdated view of a VM, a duty reads the VM again.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from functools import partial

from virtbus.bus.runtime.backoff import delays
from virtbus.bus.runtime.sources import Sources
from virtbus.bus.runtime.tasks import wait_for_event
from virtbus.cri.machine_changes import MachineChanges
from virtbus.cri.pod_networks import BUSY_S, PodNetworks
from virtbus.cri.pods import Pods
from virtbus.schemas.errors import Code, VirtbusError

log = logging.getLogger(__name__)

AGAIN_S = (0.5, 30.0)


class Duties:
    """The duties of this node's pods."""

    def __init__(
        self, pods: Pods, changes: MachineChanges, networks: PodNetworks, sources: Sources
    ) -> None:
        self._pods = pods
        self._changes = changes
        self._networks = networks
        self._sources = sources

    async def run(self) -> None:
        """Do the duties until cancelled. After a failure, repeat them with a backoff."""
        pauses = delays(*AGAIN_S, self._sources)
        while True:
            await self._pods.duties.wait()
            self._pods.duties.clear()
            if await self._do_all():
                pauses = delays(*AGAIN_S, self._sources)
            else:
                await wait_for_event(self._pods.duties, next(pauses))
                self._pods.duties.set()

    async def _do_all(self) -> bool:
        """Do the duties; return False if a duty failed.

        A refusal concerns only one VM, so the other duties follow. If the bus or a service is
        unavailable, the other duties wait, too.
        """
        done = True
        for duty in self._next():
            try:
                await duty()
            except VirtbusError as error:
                log.info("a duty waits: %s", error, extra={"code": "duty_waits"})
                done = False
                if error.code >= Code.UNAVAILABLE:
                    break
        return done

    def _next(self) -> Iterator[Callable[[], Awaitable[None]]]:
        yield self._networks.clear
        for uid in tuple(self._pods.removals):
            yield partial(self._remove, uid)
        for key in tuple(self._pods.doubted):
            yield partial(self._read_again, key)
        for key, pod in tuple(self._pods.all.items()):
            if pod.machine is not None and pod.machine.power_off:
                yield partial(self._power_off, key)
        for key in tuple(self._pods.all):
            yield partial(self._networks.release_unused, key)

    async def _remove(self, uid: str) -> None:
        await self._changes.delete(uid)
        await self._pods.discarded(uid)

    async def _read_again(self, key: str) -> None:
        if self._pods.lock(key).locked():
            asyncio.get_running_loop().call_later(BUSY_S, self._pods.duties.set)
            return
        async with self._pods.lock(key):
            try:
                await self._changes.read_again(key)
            except VirtbusError as error:
                if error.code != Code.NOT_FOUND:
                    raise
            self._pods.doubted.discard(key)

    async def _power_off(self, key: str) -> None:
        async with self._pods.lock(key):
            await self._changes.power_off(key)
