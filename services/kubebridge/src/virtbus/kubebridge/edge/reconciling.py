"""Reconciles the VMI and the VM of a name, as the core decides (ADR 0026)."""

from collections.abc import Mapping

from virtbus.bus.sources import REAL, Sources
from virtbus.kubebridge.core.objects.plain import at, part, text
from virtbus.kubebridge.core.translation.references import Given, needs
from virtbus.kubebridge.core.vm import reconcile as vm_rules
from virtbus.kubebridge.core.vmi import reconcile as vmi_rules
from virtbus.kubebridge.core.vmi.phases import FINAL
from virtbus.kubebridge.core.vmi.status import Seen, phase
from virtbus.kubebridge.edge.acting import Acting
from virtbus.kubebridge.edge.cluster import Cluster, Json
from virtbus.kubebridge.edge.guest_asks import GuestAsks
from virtbus.kubebridge.edge.kinds import CONFIG_MAP, SECRET, Kind
from virtbus.kubebridge.edge.views import Known

NEEDED: Mapping[str, Kind] = {one.kind: one for one in (SECRET, CONFIG_MAP)}
"""Kinds of objects that a VMI can refer to."""


class Reconciling:
    """Runs the rules of the core, and executes their actions."""

    def __init__(
        self,
        cluster: Cluster,
        known: Known,
        guests: GuestAsks,
        acting: Acting,
        name: str,
        sources: Sources = REAL,
    ) -> None:
        self._cluster = cluster
        self._vms, self._vmis, self._views = known
        self._guests = guests
        self._acting = acting
        self._name = name
        self._sources = sources

    async def look(self, key: str) -> float:
        """Reconcile this `namespace/name`. Return the seconds before a retry, or 0.

        The VMI comes first, because its VM reports the VMI's state. If one fails, the other still
        runs.
        """
        again_s, failure = [], None
        for part_of in (self._vmi, self._vm):
            try:
                again_s.append(await part_of(key))
            except Exception as error:  # noqa: BLE001  raised below
                failure = failure or error
        if failure is not None:
            raise failure
        return min((one for one in again_s if one), default=0.0)

    async def _vm(self, key: str) -> float:
        vm = self._vms.get(key)
        if vm is None:
            return 0.0
        failed = self._acting.memo.failed.get(text(vm, "metadata", "uid"), "")
        actions = vm_rules.reconcile(vm, self._vmis.get(key), self._sources.now(), failed)
        return await self._acting.act(actions, vm)

    async def _vmi(self, key: str) -> float:
        vmi = self._vmis.get(key)
        if vmi is None:
            return 0.0
        seen = self._seen(text(vmi, "metadata", "uid"))
        given = await self._given(vmi, seen)
        actions = vmi_rules.reconcile(vmi, seen, given, self._sources.now(), self._name)
        return await self._acting.act(actions, vmi)

    def _seen(self, uid: str) -> Seen:
        gone = self._views.gone(uid)
        view = None if gone else self._views.get(uid)
        refused = None if view is not None else self._acting.memo.refused.get(uid)
        guest, asked = self._guests.get(uid), self._guests.asked(uid)
        return Seen(view=view, gone=gone, refused=refused, guest=guest, asked=asked)

    async def _given(self, vmi: Json, seen: Seen) -> Given:
        """Read the objects that the VMI refers to, while its VM is still to be created."""
        if seen.view is not None or seen.gone or phase(vmi) in FINAL:
            return {}
        if at(vmi, "metadata", "deletionTimestamp"):
            return {}
        namespace = text(vmi, "metadata", "namespace")
        found = {}
        for kind, name in {(need.kind, need.name) for need in needs(part(vmi, "spec"))}:
            obj = await self._cluster.get(NEEDED[kind], name, namespace)
            if obj is not None:
                found[kind, name] = obj
        return found
