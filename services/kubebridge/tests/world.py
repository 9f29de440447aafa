"""A cluster and a bus as values, on which actions of the bridge and of others take effect."""

import copy
import json
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from services.kubebridge.tests.manifests import vm as smoke_vm

from virtbus.documents.crds.models.instance_status import InstanceStatus
from virtbus.documents.crds.models.virtualmachine import MachineStatus
from virtbus.kubebridge.core.objects.unstructured import Object, read
from virtbus.kubebridge.core.runtime.controller import (
    Action,
    Await,
    BusCall,
    Create,
    Delete,
    Merge,
    Patch,
    RecordEvent,
    Requeue,
)
from virtbus.kubebridge.core.translation.contents import Given
from virtbus.kubebridge.core.translation.defaults import of_vm
from virtbus.kubebridge.core.vm import reconcile as vm_rules
from virtbus.kubebridge.core.vm.model import Vm
from virtbus.kubebridge.core.vm.status import Pair
from virtbus.kubebridge.core.vmi import reconcile as vmi_rules
from virtbus.kubebridge.core.vmi import status as vmi_status
from virtbus.kubebridge.core.vmi.model import Vmi
from virtbus.kubebridge.core.vmi.status import Seen
from virtbus.schemas.guest_end import GuestExit
from virtbus.schemas.states import VmState
from virtbus.schemas.vm import VmSpec
from virtbus.schemas.vm_status import GUEST_ENDED, VmView

NOW = datetime(2026, 11, 22, 12, 0, tzinfo=UTC)
GONE = "2026-11-22T12:00:00Z"
"""A deletionTimestamp of that time."""
CLUSTER = "c1"
SPEC = VmSpec.model_validate(
    {
        "domain": {"devices": {"interfaces": [{"name": "default"}]}},
        "networks": [{"name": "default"}],
    }
)
"""The interface of the smoke VM, and nothing else."""
UP = {
    VmState.PENDING: VmState.SCHEDULED,
    VmState.SCHEDULED: VmState.PREPARING,
    VmState.PREPARING: VmState.STARTING,
    VmState.STARTING: VmState.RUNNING,
}


def view(uid: str, **fields: Any) -> VmView:
    """Return a VM as the bus shows it."""
    base: dict[str, Any] = {
        "uid": uid,
        "namespace": "default",
        "name": "kubevirt-smoke-fedora",
        "node": "n1",
        "epoch": 1,
        "generation": 1,
        "revision": 1,
        "created_ns": 1,
        "spec": SPEC,
        "labels": {"virtbus.io/cluster": CLUSTER},
        "state": VmState.PENDING,
    }
    return VmView(**(base | fields))


def reconcile_vm(vm: Object, vmi: Object | None, now: datetime, failed: str = "") -> list[Action]:
    """Reconcile a VM as JSON."""
    own = read(Vmi, vmi) if vmi is not None else None
    return vm_rules.reconcile(read(Vm, vm), own, now, failed)


def reconcile_vmi(
    vmi: Object, seen: Seen, given: Given, now: datetime, cluster: str
) -> list[Action]:
    """Reconcile a VMI as JSON."""
    return vmi_rules.reconcile(read(Vmi, vmi), seen, given, now, cluster)


def vmi_of(vm: Object, *, paused: bool) -> dict[str, Any]:
    """Return the VMI that a VM as JSON makes."""
    return vm_rules.vmi_of(read(Vm, vm), paused=paused)


def vmi_said(vmi: Object, seen: Seen, now: datetime, retried: str = "") -> dict[str, Any]:
    """Return the status of a VMI as JSON."""
    return vmi_status.status(read(Vmi, vmi), seen, now, retried)


def pair(vm: Object, vmi: Object | None, **more: Any) -> Pair:
    """Return a VM and its VMI as JSON."""
    return Pair(read(Vm, vm), read(Vmi, vmi) if vmi is not None else None, **more)


def kept_whole(status: dict[str, Any]) -> None:
    """Check that an API server keeps the whole status: the CRD's models know all of its fields."""
    model = MachineStatus if "printableStatus" in status else InstanceStatus
    model.model_validate(status, strict=True)


@dataclass
class World:
    """One VM of a cluster, its VMI, and the VMs of the bus by uid."""

    vm: dict[str, Any] | None
    vmi: dict[str, Any] | None = None
    views: dict[str, VmView] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)
    now: datetime = NOW
    writes: int = 0
    made: int = 0
    events: list[str] = field(default_factory=list)

    def copy(self) -> "World":
        """Return a copy, which a stale cache keeps from here on."""
        return copy.deepcopy(self)

    def seen(self, vmi: dict[str, Any]) -> Seen:
        uid = vmi["metadata"]["uid"]
        return Seen(view=self.views.get(uid), gone=uid in self.gone)

    # --- reconciling -------------------------------------------------------------------------
    def reconcile(self, vm: "World | None" = None, vmi: "World | None" = None,
                  bus: "World | None" = None) -> list[Action]:  # fmt: skip
        """Reconcile both objects as a bridge does that sees them as in other worlds."""
        done = self.reconcile_vm(vm or self, vmi or self)
        return done + self.reconcile_vmi(vmi or self, bus or self)

    def reconcile_vm(self, vm: "World", vmi: "World") -> list[Action]:
        if vm.vm is None:
            return []
        read = copy.deepcopy(vm.vm)
        actions = reconcile_vm(read, copy.deepcopy(vmi.vmi), self.now)
        assert read == vm.vm
        return self.act(actions, read, self.vm)

    def reconcile_vmi(self, vmi: "World", bus: "World") -> list[Action]:
        if vmi.vmi is None:
            return []
        read = copy.deepcopy(vmi.vmi)
        actions = reconcile_vmi(read, bus.seen(read), {}, self.now, CLUSTER)
        assert read == vmi.vmi
        return self.act(actions, read, self.vmi)

    def act(self, actions: list[Action], read: dict[str, Any], obj: Any) -> list[Action]:
        """Execute the actions until a write meets a conflict."""
        json.dumps([action.changes for action in actions if isinstance(action, Patch)])
        for action in actions:
            if not self._do(action, read, obj):
                break
        return [action for action in actions if not isinstance(action, Requeue | Await)]

    def _do(self, action: Action, read: dict[str, Any], obj: Any) -> bool:
        match action:
            case Create(_, vmi):
                if self.vmi is None:
                    self.made += 1
                    kept_whole(vmi["status"])
                    made = copy.deepcopy(vmi)
                    made["metadata"]["uid"] = f"0192f0c1-2d3e-7abc-8def-{self.made:012x}"
                    self.vmi = made
                    self._bump(made)
            case Delete(_, uid):
                self._delete(uid)
            case Patch(changes):
                return self._write(obj, read, changes)
            case Merge(_, changes):
                return self._merge(changes)
            case RecordEvent(reason):
                self.events.append(reason)
            case BusCall(verb, request):
                self._ask(verb, request)
            case _:
                pass
        return True

    def _delete(self, uid: str) -> None:
        if self.vmi is not None and self.vmi["metadata"]["uid"] == uid:
            self.vmi["metadata"].setdefault("deletionTimestamp", "2026-11-22T12:00:00Z")
            self._bump(self.vmi)
            self._collect()

    def _ask(self, verb: str, request: Any) -> None:
        uid = request.uid
        match verb:
            case "update":
                given = {"spec": request.spec, "labels": request.labels}
                changes = {name: one for name, one in given.items() if one is not None}
                self._see(uid, revision=request.revision + 1, **changes)
            case "create":
                if uid not in self.gone and uid not in self.views:
                    self.views[uid] = view(uid, spec=request.spec, labels=request.labels)
            case "start":
                if uid in self.views:
                    self._see(uid, state=VmState.PREPARING, reason="", message="")
            case "delete":
                if uid in self.views:
                    self._see(uid, state=VmState.DELETING, deleting=True)
                else:
                    self.gone.add(uid)
            case _:
                pass

    def _write(self, obj: Any, read: dict[str, Any], patch: dict[str, Any]) -> bool:
        """Apply a merge patch at the version that was read. A status is replaced as a whole."""
        if obj is None or obj["metadata"].get("resourceVersion") != read["metadata"].get(
            "resourceVersion"
        ):
            return False
        before = copy.deepcopy(obj)
        for part, value in patch.items():
            if part == "status":
                kept_whole(value)
                obj["status"] = copy.deepcopy(value)
            else:
                for key, one in value.items():
                    into = obj.setdefault(part, {})
                    into[key] = {**into.get(key, {}), **one} if isinstance(one, dict) else one
        assert obj != before, "a write that changes nothing"
        self.writes += 1
        self._bump(obj)
        read["metadata"]["resourceVersion"] = obj["metadata"]["resourceVersion"]
        self._collect()
        return True

    def _merge(self, changes: dict[str, Any]) -> bool:
        """Change the interfaces of the VMI at the version that was read."""
        vmi = self.vmi
        if (
            vmi is None
            or vmi["metadata"]["resourceVersion"] != changes["metadata"]["resourceVersion"]
        ):
            return False
        nics = changes["spec"]["domain"]["devices"]["interfaces"]
        devices = {**vmi["spec"]["domain"].get("devices", {}), "interfaces": nics}
        vmi["spec"]["domain"] = {**vmi["spec"]["domain"], "devices": devices}
        vmi["spec"]["networks"] = changes["spec"]["networks"]
        self.writes += 1
        self._bump(vmi)
        return True

    def _bump(self, obj: dict[str, Any]) -> None:
        version = int(obj["metadata"].get("resourceVersion", "0")) + 1
        obj["metadata"]["resourceVersion"] = str(version + 1000 * self.made)

    def _collect(self) -> None:
        """Remove deleted objects without finalizers, as the API server does."""
        for name in ("vm", "vmi"):
            obj = getattr(self, name)
            if obj and "deletionTimestamp" in obj["metadata"] and not obj["metadata"]["finalizers"]:
                setattr(self, name, None)

    # --- actions of others --------------------------------------------------------------------
    def _see(self, uid: str, **fields: Any) -> None:
        self.views[uid] = self.views[uid].model_copy(update=fields)

    @property
    def uid(self) -> str:
        """Return the uid of the existing VMI, or an empty string."""
        return str(self.vmi["metadata"]["uid"]) if self.vmi else ""

    def step(self, *, to: VmState | None = None, **fields: Any) -> bool:
        """Advance the VM on the bus by one state, or to `to`. Return False if nothing changes."""
        for uid, one in list(self.views.items()):
            if one.deleting:
                del self.views[uid]
                self.gone.add(uid)
                return True
            following = to or UP.get(one.state)
            if uid == self.uid and following is not None:
                self._see(uid, state=following, **fields)
                return True
        return False

    def ends(self, *, well: bool) -> None:
        """Let a running guest shut down or crash."""
        one = self.views.get(self.uid)
        if one is not None and one.state is VmState.RUNNING:
            end = GuestExit(how="shut down" if well else "crashed", asked=False, at_ns=1)
            state = VmState.SUCCEEDED if well else VmState.FAILED
            self._see(
                self.uid,
                state=state,
                reason="" if well else GUEST_ENDED,
                failure_stage="" if well else "guest",
                last_exit=end,
            )

    def user(self, **spec: Any) -> None:
        """Change the VM's spec as a user."""
        if self.vm is not None:
            for key, value in spec.items():
                self.vm["spec"].pop(key, None)
                if value is not None:
                    self.vm["spec"][key] = value
            self.vm["metadata"]["generation"] += 1
            self._bump(self.vm)

    def asks(self, *requests: dict[str, Any]) -> None:
        """Put requests into the VM's status, as the aggregated API does."""
        if self.vm is not None:
            self.vm.setdefault("status", {})["stateChangeRequests"] = list(requests)
            self._bump(self.vm)

    def deletes(self, *, orphan: bool = False) -> None:
        if self.vm is not None:
            meta = self.vm["metadata"]
            meta.setdefault("finalizers", [])
            if orphan:
                meta["finalizers"] = [*meta["finalizers"], "orphan"]
            meta["deletionTimestamp"] = "2026-11-22T12:00:00Z"
            self._bump(self.vm)
            self._collect()

    def settle(self, *, up: bool = True) -> None:
        """Reconcile until nothing changes. With `up`, the bus advances, too."""
        done: list[Action] = []
        for _ in range(100):
            self.now += timedelta(seconds=400)
            done = self.reconcile()
            moved = self.step() if up else False
            if not done and not moved:
                return
        raise AssertionError(f"it never rests: {done}")

    @property
    def printable(self) -> str:
        assert self.vm is not None
        return str(self.vm["status"]["printableStatus"])


def world(**spec: Any) -> World:
    """Return a world in which the smoke VM was just applied."""
    whole = smoke_vm(**spec)
    whole["metadata"]["resourceVersion"] = "1"
    return World(of_vm(whole))
