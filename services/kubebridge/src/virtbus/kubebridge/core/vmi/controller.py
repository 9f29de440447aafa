"""Registers the controller of VMIs: its inputs from the bus, the guest agents and references."""

from collections.abc import Iterable
from typing import NamedTuple

from virtbus.kubebridge.core.objects.typed import read
from virtbus.kubebridge.core.runtime.actions import Action, Refused
from virtbus.kubebridge.core.runtime.controller import Controller, Inputs, Lister, Watch
from virtbus.kubebridge.core.runtime.kinds import BUS_VM, GUEST_AGENT, VMI, Key
from virtbus.kubebridge.core.vmi.model import Vmi
from virtbus.kubebridge.core.vmi.phases import FINAL
from virtbus.kubebridge.core.vmi.reconcile import reconcile, references
from virtbus.kubebridge.core.vmi.status import GuestAnswers, Seen, Views
from virtbus.schemas.errors import Code

NAME_HELD = (
    "the name {name} is held by VM {uid} on the bus, whose VirtualMachineInstance this API server "
    "does not have. It is kept until a person decides: `virtbus vm delete {uid}` ends it and "
    "removes its disks; `virtbus vm adopt {uid}` keeps it without this cluster"
)


class Instances(NamedTuple):
    """The sources of a VMI's reconcile."""

    vmis: Lister
    views: Views
    guests: GuestAnswers
    cluster: str

    def controller(self) -> Controller:
        """Return the controller of VMIs. A VMI and its VM on the bus have one name and one uid."""
        watches = (Watch(VMI), Watch(BUS_VM), Watch(GUEST_AGENT))
        return Controller(VMI, self._reconcile, watches, self._references, workers=32)

    def _reconcile(self, key: Key, inputs: Inputs) -> list[Action]:
        if inputs.obj is None:
            return []
        vmi = read(Vmi, inputs.obj)
        uid = vmi.uid
        gone = self.views.gone(uid)
        view = None if gone else self.views.get(uid)
        refused = None if view is not None else self._by_an_orphan(key, uid, inputs.refused)
        guest, asked = self.guests.get(uid), self.guests.asked(uid)
        seen = Seen(view=view, gone=gone, refused=refused, guest=guest, asked=asked)
        given = {(one.kind.kind, one.name): obj for one, obj in inputs.references.items()}
        return reconcile(vmi, seen, given, inputs.now, self.cluster)

    def _references(self, key: Key, _: float) -> Iterable[Key]:
        """Return the references of a VMI whose VM is still to be created."""
        uid = self.vmis.uid(key.path)
        if not uid or self.views.gone(uid) or self.views.get(uid) is not None:
            return ()
        vmi = read(Vmi, self.vmis.get(key.path))
        return () if vmi.deleting or vmi.phase in FINAL else references(vmi)

    def _by_an_orphan(self, key: Key, uid: str, refused: Refused | None) -> Refused | None:
        """Name the orphaned VM that holds the name, so that a person can decide."""
        if refused is None or refused.code != Code.CONFLICT:
            return refused
        for other in self.views.named(key.path):
            if other != uid and not self.vmis.ended(other):
                message = NAME_HELD.format(name=key.name, uid=other)
                return Refused(Code.CONFLICT, "name_held_by_orphan", message)
        return refused
