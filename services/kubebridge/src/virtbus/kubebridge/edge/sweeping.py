"""VMs of this cluster that no VMI stands for: a create of a bridge that was slow, or died.

A suspect is one whose VMI we do not see, for GRACE_S; it is ended once the API server itself, asked
then, has no VMI of that name and uid. VMs without this cluster's label are never looked at.
"""

import asyncio
import logging

from virtbus.bus.ports import BusError
from virtbus.kubebridge.core import vmi_rules
from virtbus.kubebridge.core.plain import text
from virtbus.kubebridge.edge.acting import Acting, EndedError
from virtbus.kubebridge.edge.cluster import Answer, Cluster
from virtbus.kubebridge.edge.kinds import VMI
from virtbus.kubebridge.edge.views import Known
from virtbus.kubebridge.edge.work import Work
from virtbus.schemas.errors import VirtbusError

log = logging.getLogger(__name__)

GRACE_S = 10.0
"""Longer than a VMI that was made may take to be told to us."""
INTERVAL_S = 5.0


class Sweeping:
    """Ends orphans while `run` runs and `held` is set; forgets what is gone whoever writes."""

    def __init__(
        self,
        cluster: Cluster,
        known: Known,
        acting: Acting,
        work: Work,
        name: str,
        held: asyncio.Event,
    ) -> None:
        self._cluster = cluster
        self._known = known
        self._acting = acting
        self._work = work
        self._name = name
        self._held = held
        self._since_s: dict[str, float] = {}

    async def run(self) -> None:
        """Sweep until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            self._forget()
            if not self._held.is_set():
                continue
            for uid, key in self._suspects():
                try:
                    await self._look(uid, key)
                except (Answer, BusError, VirtbusError) as error:
                    log.info("sweep of %s: %s", key, error, extra={"code": "sweep_failed"})

    def _suspects(self) -> list[tuple[str, str]]:
        """Those that have been without their VMI for long enough, by the loop's clock."""
        now_s = asyncio.get_running_loop().time()
        alone = [(uid, key) for uid, key in self._known.views if self._known.vmis.uid(key) != uid]
        self._since_s = {uid: self._since_s.get(uid, now_s) for uid, _ in alone}
        return [(uid, key) for uid, key in alone if now_s - self._since_s[uid] >= GRACE_S]

    async def _look(self, uid: str, key: str) -> None:
        namespace, _, name = key.partition("/")
        vmi = await self._cluster.get(VMI, name, namespace)
        there = {text(vmi, "metadata", "uid")}
        view = self._known.views.get(uid)
        if vmi_rules.orphans([view] if view else [], there, self._name):
            log.warning("ends %s: no VMI has its uid %s", key, uid, extra={"code": "orphan"})
            await self._end(uid)

    async def _end(self, uid: str) -> None:
        try:
            await self._acting.delete(uid)
        except EndedError:
            log.debug("%s was gone", uid)

    def _forget(self) -> None:
        """What is remembered of objects that are gone."""
        vms, vmis, views = self._known
        uids = {objects.uid(key) for objects in (vms, vmis) for key in objects}
        views.forget_but(uids)
        self._acting.memo.forget_but(uids)
        if not self._held.is_set():  # who writes works its queue off
            self._work.forget_but({*vms, *vmis})
