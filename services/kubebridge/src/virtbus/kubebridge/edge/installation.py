"""Tells by the `kubevirt` objects that KubeVirt's API is served."""

import asyncio
import contextlib
import logging

from virtbus.kubebridge.core.installed import status
from virtbus.kubebridge.core.plain import number, part, text
from virtbus.kubebridge.edge.cluster import Answer, Cluster
from virtbus.kubebridge.edge.kinds import KUBEVIRT
from virtbus.kubebridge.edge.sweeping import Sweeping

LOOK_S = 300.0
RETRY_S = 10.0
_log = logging.getLogger(__name__)


class Installation:
    """Looks now and then, while `acts` is set; clients look at these objects only to begin."""

    def __init__(self, cluster: Cluster, acts: asyncio.Event, sweeping: Sweeping) -> None:
        self._cluster = cluster
        self._acts = acts
        self._sweeping = sweeping

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._acts.wait()
            try:
                await self.tell()
            except Answer as answer:
                _log.warning("kubevirt: %s", answer)
                await asyncio.sleep(RETRY_S)
            else:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await self._sweeping.changed.wait()

    async def tell(self) -> None:
        """Write what is not said yet, or is of another version."""
        self._sweeping.changed.clear()
        listed = await self._cluster.list(KUBEVIRT)
        for one in listed.items:
            said = status(number(one, "metadata", "generation"), self._sweeping.orphans)
            if part(one, "status") != said:
                name, namespace = (text(one, "metadata", key) for key in ("name", "namespace"))
                await self._cluster.patch(KUBEVIRT, name, {"status": said}, namespace, "status")
