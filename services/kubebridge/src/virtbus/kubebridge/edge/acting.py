"""Executes the core's actions in order (`core/actions.py` documents each).

A write is made at the version that was read. A conflict or a refusal ends the actions. Temporary
errors are raised, and retried.
"""

import logging
from dataclasses import dataclass, field
from typing import Any

from virtbus.bus.ports import Bus
from virtbus.kubebridge.core.objects.plain import Object, at, text
from virtbus.kubebridge.core.runtime.actions import (
    AT_ONCE_S,
    Action,
    BusCreate,
    BusDelete,
    BusStart,
    CreateVmi,
    DeleteVmi,
    LookAgain,
    Tell,
    WriteVm,
    WriteVmi,
    WriteVmStatus,
)
from virtbus.kubebridge.edge.cluster import Answer, Cluster, Json
from virtbus.kubebridge.edge.kinds import VM, VMI
from virtbus.kubebridge.edge.telling import Teller
from virtbus.kubebridge.edge.views import Known
from virtbus.schemas import subjects
from virtbus.schemas.api import VmCreated, VmDelete, VmRef, VmUpdate
from virtbus.schemas.errors import Code, ErrorBody, VirtbusError
from virtbus.schemas.quarantine import ORPHANED
from virtbus.schemas.vm import VmView
from virtbus.schemas.wire import validate

log = logging.getLogger(__name__)

REQUEST_S = 10.0
CONFLICT_S = 0.5
"""Seconds before a retry after a conflict. The watch usually delivers the newer object earlier."""
REFUSED_S = 60.0
"""Seconds before a retry after a write that the API server rejects at any version."""
THERE = "AlreadyExists"
NAME_HELD = (
    "the name {name} is held by VM {uid} on the bus, whose VirtualMachineInstance this API server "
    "does not have. It is kept until a person decides: `virtbus vm delete {uid}` ends it and "
    "removes its disks; `virtbus vm adopt {uid}` keeps it without this cluster"
)
_AFTER_S = {404: 0.0, 409: CONFLICT_S}


@dataclass(slots=True)
class Memo:
    """Recent refusals that are yet to be reported, by the uid of their object."""

    failed: dict[str, str] = field(default_factory=dict)
    """Reasons why the last create of a VM's VMI failed, by the VM's uid."""
    refused: dict[str, ErrorBody] = field(default_factory=dict)
    """Last refusals of `vm.create`, by the VMI's uid."""

    def forget_but(self, uids: set[str]) -> None:
        """Keep only the refusals of these objects."""
        for told in (self.failed, self.refused):
            for uid in told.keys() - uids:
                told.pop(uid)


class EndedError(Exception):
    """Ends the actions. The remaining ones are skipped; reconcile again after `after_s`."""

    def __init__(self, after_s: float) -> None:
        super().__init__()
        self.after_s = after_s


class Acting:
    """Executes the actions of a reconcile."""

    def __init__(self, cluster: Cluster, bus: Bus, known: Known, teller: Teller) -> None:
        self._cluster = cluster
        self._bus = bus
        self._objects = {VM.kind: known.vms, VMI.kind: known.vmis}
        self._views = known.views
        self._teller = teller
        self.memo = Memo()

    def tell(self, obj: Json, what: Tell) -> None:
        """Record an Event on any object."""
        self._teller.tell(obj, what)

    async def act(self, actions: list[Action], read: Json) -> float:
        """Execute the actions on the object. Return the seconds before the next reconcile, or 0."""
        again_s = [action.after_s for action in actions if isinstance(action, LookAgain)]
        try:
            for action in actions:
                await self._do(action, read)
        except EndedError as ended:
            again_s.append(ended.after_s)
        return min((one for one in again_s if one), default=0.0)

    async def _do(self, action: Action, read: Json) -> None:
        match action:
            case CreateVmi() | DeleteVmi() | WriteVmi() | WriteVm() | WriteVmStatus():
                await self._write(action, read)
            case BusCreate() | BusStart() | BusDelete():
                await self._ask(action)
            case Tell():
                self._teller.tell(read, action)
            case LookAgain():
                pass

    # --- Kubernetes -----------------------------------------------------------------------
    async def _write(
        self, action: CreateVmi | DeleteVmi | WriteVmi | WriteVm | WriteVmStatus, read: Json
    ) -> None:
        meta = read["metadata"]
        match action:
            case CreateVmi(vmi):
                await self._create(vmi, read)
            case DeleteVmi(uid, version):
                await self._delete(meta["name"], meta["namespace"], uid, version)
            case WriteVmi(patch) | WriteVm(patch):
                await self._patch(read, patch)
            case WriteVmStatus(status):
                await self._patch(read, {"status": status}, "status")

    async def _create(self, vmi: Json, vm: Json) -> None:
        """Create the VMI; AlreadyExists is success.

        A rejection is reported by the next reconcile.
        """
        uid = text(vm, "metadata", "uid")
        try:
            await self._cluster.create(VMI, vmi, vmi["metadata"]["namespace"])
        except Answer as answer:
            if answer.passing:
                raise
            if answer.code == 409 and answer.reason != THERE:  # a quota that others change, too
                raise EndedError(CONFLICT_S) from None
            if answer.code != 409:
                news = uid not in self.memo.failed
                self.memo.failed[uid] = answer.message
                raise EndedError(AT_ONCE_S if news else 0.0) from None
        self.memo.failed.pop(uid, None)

    async def _delete(self, name: str, namespace: str, uid: str, version: str) -> None:
        """Delete the VMI at the version read. One released since (`--cascade=orphan`) is kept."""
        try:
            await self._cluster.delete(VMI, name, namespace, uid, version)
        except Answer as answer:
            if answer.code != 409:
                raise
            raise EndedError(CONFLICT_S) from None

    async def _patch(self, read: Json, patch: Json, sub: str = "") -> None:
        """Patch the object at the version that was read, and keep the new version."""
        meta = read["metadata"]
        kind = VM if read["kind"] == VM.kind else VMI
        try:
            written = await self._cluster.patch(
                kind, meta["name"], operations(read, patch), meta["namespace"], sub, how="json"
            )
        except Answer as answer:
            if answer.passing:
                raise
            if answer.code not in {404, 409}:
                log.warning(
                    "%s/%s: %s", meta["namespace"], meta["name"], answer, extra={"code": "refused"}
                )
            if answer.code in {401, 403}:
                raise  # a starting API server may not know the permissions yet
            raise EndedError(_AFTER_S.get(answer.code, REFUSED_S)) from None
        meta["resourceVersion"] = written["metadata"]["resourceVersion"]
        self._objects[kind.kind].wrote(written)

    # --- the bus --------------------------------------------------------------------------
    async def _ask(self, action: BusCreate | BusStart | BusDelete) -> None:
        match action:
            case BusCreate(create):
                await self._created(str(create.uid), create)
            case BusDelete(uid, grace_s):
                await self.delete(uid, grace_s)
            case BusStart(uid):
                try:
                    await self._request("start", VmRef(uid=uid))
                except VirtbusError as error:
                    if error.code >= Code.EXHAUSTED:
                        raise

    async def _created(self, uid: str, create: Any) -> None:
        refused = self.memo.refused
        try:
            answer = await self._request("create", create)
        except VirtbusError as error:
            if error.code > Code.EXHAUSTED or error.reason == "busy":
                raise
            if error.code == Code.GONE:
                self._views.ended(uid)
                raise EndedError(AT_ONCE_S) from None
            error = self._held_by_an_orphan(create, error)
            news = uid not in refused or refused[uid].reason != error.reason
            refused[uid] = error.body
            if news:
                raise EndedError(AT_ONCE_S) from None
            return  # the next actions report it
        refused.pop(uid, None)
        self._views.answered(validate(VmCreated, answer).vm)

    def _held_by_an_orphan(self, create: Any, error: VirtbusError) -> VirtbusError:
        """Name the orphaned VM that holds the name, so that a person can decide."""
        key = f"{create.namespace}/{create.name}"
        vmis = self._objects[VMI.kind]
        for uid, name in self._views:
            if name == key and uid not in {str(create.uid), vmis.uid(key)} and not vmis.ended(uid):
                message = NAME_HELD.format(name=create.name, uid=uid)
                return VirtbusError(Code.CONFLICT, "name_held_by_orphan", message)
        return error

    async def hold(self, uid: str, why: str) -> None:
        """Mark a VM as orphaned, or remove the mark. After a conflict, the next round retries."""
        view = self._views.get(uid)
        if view is None:
            return
        notes = {name: one for name, one in view.annotations.items() if name != ORPHANED}
        notes |= {ORPHANED: why} if why else {}
        update = VmUpdate(uid=uid, revision=view.revision, annotations=notes)
        self._views.answered(validate(VmView, await self._request("update", update)))

    async def delete(self, uid: str, grace_s: int | None = None) -> None:
        """Delete a VM. A missing one is certainly gone."""
        try:
            answer = await self._request("delete", VmDelete(uid=uid, grace_s=grace_s))
        except VirtbusError as error:
            if error.code != Code.NOT_FOUND:
                raise
            self._views.ended(uid)
            raise EndedError(AT_ONCE_S) from None
        self._views.answered(validate(VmView, answer))

    async def _request(self, verb: str, value: Any) -> Any:
        return await self._bus.request(subjects.api("vm", verb), value, timeout_s=REQUEST_S)


def operations(read: Object, patch: Json) -> list[Json]:
    """Return a JSON patch at the version that was read, so that a concurrent write is a conflict.

    `status` replaces the whole status. Labels are added to existing ones.
    """
    version = text(read, "metadata", "resourceVersion")
    made = [_add(("metadata", "resourceVersion"), version)]
    for part, value in patch.items():
        if part == "status":
            made.append(_add((part,), value))
            continue
        for name, one in value.items():
            if isinstance(one, dict) and isinstance(at(read, part, name), dict):
                made += [_add((part, name, key), inner) for key, inner in one.items()]
            else:
                made.append(_add((part, name), one))
    return made


def _add(path: tuple[str, ...], value: Any) -> Json:
    pointer = "".join("/" + one.replace("~", "~0").replace("/", "~1") for one in path)
    return {"op": "add", "path": pointer, "value": value}
