"""Garbage-collects this cluster's VMs that have no VMI.

A slow create or a restored API server can leave such VMs. A VM is a suspect if its VMI was not seen
for GRACE_S. Then the API server itself is asked. If the end of its VMI was reported
(`Objects.ended`), the VM is deleted. Otherwise a person decides (ADR 0033): the VM is marked on the
bus, and reported by an Event and by the `kubevirt` object. VMs without this cluster's label are
ignored.
"""

import asyncio
import logging

from virtbus.bus.ports import BusError
from virtbus.kubebridge.core.objects.plain import text
from virtbus.kubebridge.core.runtime.actions import BusDelete, BusHold, Tell
from virtbus.kubebridge.core.vmi import reconcile as vmi_rules
from virtbus.kubebridge.edge.acting import Acting, EndedError
from virtbus.kubebridge.edge.cluster import Answer, Cluster
from virtbus.kubebridge.edge.kinds import VMI
from virtbus.kubebridge.edge.views import Known
from virtbus.kubebridge.edge.work import Work
from virtbus.schemas.errors import VirtbusError

log = logging.getLogger(__name__)

GRACE_S = 10.0
"""Longer than the delay between the creation of a VMI and its watch event."""
INTERVAL_S = 5.0
LOOK_AGAIN_S = 300.0
"""Time between two checks of a kept VM. The API server may be restored once more."""


class Sweeping:
    """Checks orphans while `held` is set. Removes stale entries of caches in any case."""

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
        self._looked_s: dict[str, float] = {}
        """Loop times of the last check of kept VMs, by uid."""
        self.changed = asyncio.Event()
        """Set when `orphans` changes."""

    @property
    def orphans(self) -> dict[str, str]:
        """Return the `namespace/name` of each kept VM, by uid."""
        keys = dict(self._known.views)
        return {uid: keys[uid] for uid in sorted(self._looked_s) if uid in keys}

    async def run(self) -> None:
        """Sweep until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            self._forget()
            if not self._held.is_set():
                continue
            before = self.orphans
            for uid, key in [*self._suspects(), *self._back()]:
                try:
                    await self._look(uid, key)
                except (Answer, BusError, VirtbusError) as error:
                    log.info("sweep of %s: %s", key, error, extra={"code": "sweep_failed"})
            if self.orphans != before:
                self.changed.set()

    def _suspects(self) -> list[tuple[str, str]]:
        """Return the VMs that have been without their VMI for long enough, by the loop's clock."""
        now_s = asyncio.get_running_loop().time()
        alone = [(uid, key) for uid, key in self._known.views if self._known.vmis.uid(key) != uid]
        self._since_s = {uid: self._since_s.get(uid, now_s) for uid, _ in alone}
        self._looked_s = {uid: at for uid, at in self._looked_s.items() if uid in self._since_s}
        due_s = {uid: since + GRACE_S for uid, since in self._since_s.items()}
        due_s |= {uid: at_s + LOOK_AGAIN_S for uid, at_s in self._looked_s.items()}
        return [(uid, key) for uid, key in alone if now_s >= due_s[uid]]

    def _back(self) -> list[tuple[str, str]]:
        """Return the VMs that are marked, although their VMI exists."""
        return [
            (uid, key)
            for uid, key in self._known.views
            if self._known.vmis.uid(key) == uid and self._known.views.marked(uid)
        ]

    async def _look(self, uid: str, key: str) -> None:
        namespace, _, name = key.partition("/")
        vmi = await self._cluster.get(VMI, name, namespace)
        view = self._known.views.get(uid)
        if view is None:
            return
        there, ended = text(vmi, "metadata", "uid"), self._known.vmis.ended(uid)
        found = vmi_rules.orphan(view, there, self._name, ended=ended)
        if isinstance(found, BusDelete):
            log.warning("deleting %s: its VMI %s was deleted", key, uid, extra={"code": "orphan"})
            self._looked_s.pop(uid, None)
            await self._end(uid)
            return
        if there == uid or view.deleting:
            self._looked_s.pop(uid, None)
        else:
            self._tell(uid, key)
        if isinstance(found, BusHold):
            await self._acting.hold(uid, found.why)

    def _tell(self, uid: str, key: str) -> None:
        """Report a kept VM at each check: in the log, and by an Event on the object of its name."""
        self._looked_s[uid] = asyncio.get_running_loop().time()
        message = vmi_rules.HELD.format(key=key, uid=uid)
        log.warning("%s", message, extra={"code": "orphan_held", "uid": uid})
        for objects in (self._known.vmis, self._known.vms):
            obj = objects.get(key)
            if obj is not None:
                self._acting.tell(obj, Tell("OrphanHeld", message, warning=True))
                return

    async def _end(self, uid: str) -> None:
        try:
            await self._acting.delete(uid)
        except EndedError:
            log.debug("%s was already gone", uid)

    def _forget(self) -> None:
        """Forget objects that are gone."""
        vms, vmis, views = self._known
        uids = {objects.uid(key) for objects in (vms, vmis) for key in objects}
        views.forget_but(uids)
        self._acting.memo.forget_but(uids)
        if not self._held.is_set():  # the leader works off its queue
            self._work.forget_but({*vms, *vmis})
