"""Writes the status of the `kubevirt` objects, which tells clients the version of the API."""

import asyncio
import logging

from virtbus.kubebridge.core.installation.status import status
from virtbus.kubebridge.core.objects.plain import Object, number, part, text
from virtbus.kubebridge.edge.cluster import Answer, Cluster
from virtbus.kubebridge.edge.kinds import KUBEVIRT
from virtbus.kubebridge.edge.sweeping import Sweeping

RETRY_S = 10.0
PAUSE_S = 1.0
"""Delay between the end of a watch and the next list."""
GONE = 410
"""Code of a version that the API server no longer knows. Only a new list helps."""
_log = logging.getLogger(__name__)


class Installation:
    """Watches the objects while `acts` is set, and rewrites each outdated status."""

    def __init__(self, cluster: Cluster, acts: asyncio.Event, sweeping: Sweeping) -> None:
        self._cluster = cluster
        self._acts = acts
        self._sweeping = sweeping

    async def run(self) -> None:
        """Run until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._orphaned())
            while True:
                await self._acts.wait()
                try:
                    await self._follow(await self.tell())
                except Answer as answer:
                    if answer.code != GONE:
                        _log.warning("kubevirt: %s", answer)
                        await asyncio.sleep(RETRY_S)
                await asyncio.sleep(PAUSE_S)

    async def _orphaned(self) -> None:
        """Write again if the set of orphaned VMs changes."""
        while True:
            await self._sweeping.changed.wait()
            self._sweeping.changed.clear()
            try:
                await self.tell()
            except Answer as answer:
                _log.warning("kubevirt: %s", answer)
                self._sweeping.changed.set()
                await asyncio.sleep(RETRY_S)

    async def tell(self) -> str:
        """Write each outdated status. Return the version of the list."""
        listed = await self._cluster.list(KUBEVIRT)
        for one in listed.items:
            await self._write(one)
        return listed.resource_version

    async def _follow(self, version: str) -> None:
        """React to each change until the watch ends or another replica leads."""
        async for event in self._cluster.watch(KUBEVIRT, version):
            if not self._acts.is_set():
                return
            if event.type in {"ADDED", "MODIFIED"}:
                await self._write(event.object)

    async def _write(self, one: Object) -> None:
        said = status(number(one, "metadata", "generation"), self._sweeping.orphans)
        if part(one, "status") != said:
            name, namespace = (text(one, "metadata", key) for key in ("name", "namespace"))
            await self._cluster.patch(KUBEVIRT, name, {"status": said}, namespace, "status")
