"""Reconcile of this cluster's VMs on the bus that have no VMI.

A slow create or a restored API server can leave such VMs. A VM whose VMI is not in the cache is a
suspect. After GRACE_S, the bridge asks the API server itself for this VMI. If the VMI does not
exist, the VM is deleted or kept:

- The end of the VMI was reported: the VM is deleted.
- No end was reported: a person decides (ADR 0033). The VM is marked on the bus, and reported by an
  Event and by the `kubevirt` object.

VMs without this cluster's label are ignored.
"""

from collections.abc import Iterable

from virtbus.kubebridge.core.objects.unstructured import text
from virtbus.kubebridge.core.runtime.controller import (
    BUS_VM,
    VM,
    VMI,
    Action,
    BusCall,
    Controller,
    Inputs,
    Key,
    KeyMapping,
    Lister,
    Notify,
    RecordEvent,
    Requeue,
)
from virtbus.kubebridge.core.translation.mapping import CLUSTER
from virtbus.kubebridge.core.vmi.reconcile import delete
from virtbus.kubebridge.core.vmi.status import VmLister
from virtbus.schemas.api import VmUpdate
from virtbus.schemas.quarantine import ORPHANED
from virtbus.schemas.vm_status import VmView

GRACE_S = 10.0
"""Seconds before a suspect's first check. A new VMI's watch event arrives within this time."""
LOOK_AGAIN_S = 300.0
"""Seconds between two checks of a kept VM. A restored API server may get its VMI back."""
NO_VMI = "its cluster has no VirtualMachineInstance for it, and reported no delete"
OTHER_VMI = "its cluster has another VirtualMachineInstance of its name, and reported no delete"
HELD = (
    "VM {uid} of virtbus has no VirtualMachineInstance {key} here, and no delete was reported. "
    "It is kept: `virtbus vm delete {uid}` ends it and removes its disks; `virtbus vm adopt "
    "{uid}` keeps it without this cluster"
)


def orphan(view: VmView, there: str, cluster: str, *, ended: bool) -> BusCall | None:
    """Return the action for a VM on the bus, or None.

    `there` is the uid of the VMI that has the VM's name; empty if none has it. `ended` is True if
    the end of the VM's own VMI was reported. The VM is then deleted: a slow bridge may have created
    it after that end. Without a reported end, the VM is only marked. Its VMI may be absent because
    the API server was restored to an older state (ADR 0033).
    """
    if view.labels.get(CLUSTER) != cluster or view.deleting:
        return None
    if there == view.uid:
        return hold(view, "") if ORPHANED in view.annotations else None
    if ended:
        return delete(view.uid)
    why = OTHER_VMI if there else NO_VMI
    return hold(view, why) if view.annotations.get(ORPHANED) != why else None


def hold(view: VmView, why: str) -> BusCall:
    """Return the call that marks a VM as orphaned for the reason `why`. The VM continues to run.

    If `why` is empty, the call removes the mark.
    """
    notes = {name: one for name, one in view.annotations.items() if name != ORPHANED}
    notes |= {ORPHANED: why} if why else {}
    return BusCall("update", VmUpdate(uid=view.uid, revision=view.revision, annotations=notes))


class Orphans:
    """The suspects, and the VMs that are kept until a person decides.

    `notify` gets the `namespace/name` of a VM when the VM becomes kept, or is no longer kept.
    """

    def __init__(
        self,
        cluster: str,
        vms: Lister,
        vmis: Lister,
        views: VmLister,
        delays_s: tuple[float, float] = (GRACE_S, LOOK_AGAIN_S),
    ) -> None:
        self._cluster = cluster
        self._vms = vms
        self._vmis = vmis
        self._views = views
        self._grace_s, self._again_s = delays_s
        self._due_s: dict[str, dict[str, float]] = {}
        """Time of each suspect's next check, by the suspect's name and then by its uid."""
        self.kept: dict[str, str] = {}
        """The `namespace/name` of each kept VM, by uid."""
        self.notify: Notify = lambda _: None

    def paths(self) -> Iterable[str]:
        return tuple(self.kept.values())

    def controller(self) -> Controller:
        watches = (KeyMapping(BUS_VM, self._suspicious), KeyMapping(VMI, self._suspicious))
        return Controller(BUS_VM, self.reconcile, watches, self._references, workers=4)

    def _suspicious(self, key: Key) -> Iterable[Key]:
        """Return the key if its name has a suspect, a marked VM, or a VM without its VMI."""
        path = key.path
        uid = self._vmis.uid(path)
        odd = any(one != uid or self._views.marked(one) for one in self._views.named(path))
        return (key,) if odd or path in self._due_s else ()

    def _references(self, key: Key, time_s: float) -> Iterable[Key]:
        """Return the key of the VMI if the bridge must read this VMI from the API server now.

        The read is needed if the check of a suspect is due, or if the VM of the cached VMI is
        marked.
        """
        uid = self._vmis.uid(key.path)
        due = any(at_s <= time_s for at_s in self._due_s.get(key.path, {}).values())
        return (key.of(VMI),) if due or (uid and self._views.marked(uid)) else ()

    def reconcile(self, key: Key, inputs: Inputs) -> list[Action]:
        before, asked = dict(self.kept), tuple(self._references(key, inputs.time_s))
        read = text(inputs.references.get(key.of(VMI)), "metadata", "uid")
        there = read if asked else self._vmis.uid(key.path)
        due_s = self._due_s.pop(key.path, {})
        for uid in due_s:
            self.kept.pop(uid, None)
        actions: list[Action] = []
        for uid in self._views.named(key.path):
            view = self._views.get(uid)
            if view is None or view.deleting or there == uid:
                found = orphan(view, there, self._cluster, ended=False) if view else None
                actions += [found] if found is not None and asked else []
                continue
            at_s = due_s.get(uid, inputs.time_s + self._grace_s)
            if at_s <= inputs.time_s:
                at_s = inputs.time_s + self._again_s
                actions += self._checked(view, key, there)
            elif uid in before:
                self.kept[uid] = key.path
            self._due_s.setdefault(key.path, {})[uid] = at_s
            actions.append(Requeue(at_s - inputs.time_s))
        if self.kept != before:
            self.notify(key.path)
        return actions

    def _checked(self, view: VmView, key: Key, there: str) -> list[Action]:
        ended = self._vmis.ended(view.uid)
        found = orphan(view, there, self._cluster, ended=ended)
        actions: list[Action] = [found] if found is not None else []
        on = key.of(VMI if self._vmis.uid(key.path) or not self._vms.uid(key.path) else VM)
        if ended:
            message = f"deleting {key.path} on the bus: its VMI {view.uid} was deleted"
            event = RecordEvent("OrphanDeleted", message, warning=True, on=on, code="orphan")
        else:
            self.kept[view.uid] = key.path
            message = HELD.format(key=key.path, uid=view.uid)
            event = RecordEvent("OrphanHeld", message, warning=True, on=on, code="orphan_held")
        return [event, *actions]
