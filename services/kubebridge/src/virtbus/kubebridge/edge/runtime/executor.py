"""Executor of the actions of a reconcile. `core/runtime/controller.py` documents the actions.

A Patch or Replace is made at the version that was read. A conflict ends the actions. A refusal ends
the actions if it is not ignored and its reason is new. Temporary errors are raised, and the work
queue retries the reconcile.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from virtbus.bus.client.ports import Bus
from virtbus.kubebridge.core.objects.unstructured import Object, at, pointer, text
from virtbus.kubebridge.core.runtime.controller import (
    AT_ONCE_S,
    Action,
    Await,
    BusCall,
    Create,
    Delete,
    GroupCall,
    Key,
    Kind,
    Merge,
    OnRefusal,
    Patch,
    RecordEvent,
    Refused,
    Replace,
    Requeue,
)
from virtbus.kubebridge.edge.bus_groups import BusGroups
from virtbus.kubebridge.edge.cluster import Json, KubernetesApi, StatusError
from virtbus.kubebridge.edge.runtime.event_recorder import EventRecorder
from virtbus.kubebridge.edge.runtime.store import ObjectStore
from virtbus.kubebridge.edge.runtime.vm_informer import VmInformer
from virtbus.schemas import subjects
from virtbus.schemas.api import VmCreated
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.wire import validate

log = logging.getLogger(__name__)

REQUEST_S = 10.0
CONFLICT_S = 0.5
"""Seconds before a retry after a conflict. The watch usually delivers the newer object earlier."""
REFUSED_S = 60.0
"""Seconds before a retry after a write that the API server rejects at any version."""
THERE = "AlreadyExists"
_AFTER_S = {404: 0.0, 409: CONFLICT_S}


class EndedError(Exception):
    """Ends the actions of a reconcile. The remaining actions are skipped.

    The next reconcile follows after `after_s` seconds; if `after_s` is 0, after the next change.
    """

    def __init__(self, after_s: float) -> None:
        super().__init__()
        self.after_s = after_s


class Executor:
    """Executes actions, and remembers refusals that the next reconcile reports."""

    def __init__(
        self,
        cluster: KubernetesApi,
        bus: Bus,
        stores: Mapping[Kind, ObjectStore],
        vms: VmInformer,
        recorder: EventRecorder,
        groups: BusGroups,
    ) -> None:
        self._cluster = cluster
        self._bus = bus
        self._stores = stores
        self._vms = vms
        self._recorder = recorder
        self._groups = groups
        self._refusals: dict[Key, tuple[str, Refused]] = {}
        """The last refusal of each object, with the object's uid."""

    def refused(self, key: Key, uid: str) -> Refused | None:
        """Return the last refusal for the object, or None.

        A refusal for an earlier object of the same name is forgotten.
        """
        of_uid, refused = self._refusals.get(key, (uid, None))
        if of_uid == uid:
            return refused
        del self._refusals[key]
        return None

    async def execute(self, actions: Sequence[Action], key: Key, read: Json | None) -> float:
        """Execute the actions. Return the seconds before the next reconcile; 0 for none."""
        again_s = [action.after_s for action in actions if isinstance(action, Requeue)]
        try:
            for action in actions:
                await self._do(action, key, read or {})
        except EndedError as ended:
            again_s.append(ended.after_s)
        return min((one for one in again_s if one), default=0.0)

    async def _do(self, action: Action, key: Key, read: Json) -> None:
        match action:
            case Create():
                await self._create(action, key, read)
            case Patch():
                await self._patch(action, key, read)
            case Replace() | Delete() | Merge():
                await self._write(action)
            case BusCall():
                await self._call(action, key, read)
            case GroupCall():
                await self._group_call(action, key, read)
            case RecordEvent():
                self._record(action, read)
            case Requeue() | Await():
                pass

    def _record(self, action: RecordEvent, read: Json) -> None:
        if action.code:
            log.warning("%s", action.message, extra={"code": action.code})
        on = read if action.on is None else self._stores[action.on.kind].get(action.on.path)
        if on is not None:
            self._recorder.record(on, action)

    # --- Kubernetes -----------------------------------------------------------------------
    async def _create(self, action: Create, key: Key, read: Json) -> None:
        namespace = text(action.body, "metadata", "namespace")
        try:
            await self._cluster.create(action.kind, action.body, namespace)
        except StatusError as answer:
            if answer.transient:
                raise
            if answer.code == 409 and answer.reason != THERE:  # for example, a quota changed
                raise EndedError(CONFLICT_S) from None
            if answer.code != 409:
                self._report(key, read, Refused(answer.code, answer.reason, answer.message))
                return
        self._refusals.pop(key, None)

    async def _write(self, action: Replace | Delete | Merge) -> None:
        try:
            match action:
                case Replace(kind, body):
                    self._stores[kind].wrote(await self._cluster.replace(kind, body))
                case Delete((kind, namespace, name), uid, version):
                    await self._cluster.delete(kind, name, namespace, uid, version)
                case Merge((kind, namespace, name), changes):
                    await self._cluster.patch(kind, name, changes, namespace)
        except StatusError as answer:
            if isinstance(action, Merge) and answer.code == 404:
                raise EndedError(action.absent_s) from None
            if answer.code != 409:
                raise
            raise EndedError(CONFLICT_S) from None

    async def _patch(self, action: Patch, key: Key, read: Json) -> None:
        changes = operations(read, action.changes)
        kind, namespace, name = key
        try:
            written = await self._cluster.patch(
                kind, name, changes, namespace, action.sub, how="json"
            )
        except StatusError as answer:
            if answer.transient:
                raise
            if answer.code not in {404, 409}:
                log.warning("%s: %s", key.path, answer, extra={"code": "refused"})
            if answer.code in {401, 403}:
                raise  # a starting API server may not know the permissions yet
            raise EndedError(_AFTER_S.get(answer.code, REFUSED_S)) from None
        read["metadata"]["resourceVersion"] = written["metadata"]["resourceVersion"]
        self._stores[kind].wrote(written)

    # --- the bus --------------------------------------------------------------------------
    async def _call(self, action: BusCall, key: Key, read: Json) -> None:
        subject = subjects.api("vm", action.verb)
        try:
            reply = await self._bus.request(subject, action.request, timeout_s=REQUEST_S)
        except VirtbusError as error:
            if error.code == action.gone:
                self._vms.ended(str(getattr(action.request, "uid", "")))
                raise EndedError(AT_ONCE_S) from None
            reports = action.refusal is OnRefusal.REPORT
            busy = error.code > Code.EXHAUSTED or error.reason == "busy"
            waits = error.code == Code.EXHAUSTED and not reports
            if busy or waits or action.refusal is OnRefusal.RETRY:
                raise
            if reports:
                self._report(key, read, Refused(error.code, error.reason, str(error.body.message)))
            return
        self._refusals.pop(key, None)
        found = validate(action.answer, reply)
        self._vms.answered(found.vm if isinstance(found, VmCreated) else found)

    async def _group_call(self, action: GroupCall, key: Key, read: Json) -> None:
        """Send a call about a security group.

        After 404 or 409, list the groups again. If the list shows a change of the group, end the
        actions. The next reconcile then starts from the new list. Otherwise report the refusal.
        """
        subject = subjects.api("security-group", action.verb)
        try:
            reply = await self._bus.request(subject, action.request, timeout_s=REQUEST_S)
        except VirtbusError as error:
            if error.code > Code.EXHAUSTED or error.reason == "busy":
                raise
            if error.code not in {Code.NOT_FOUND, Code.CONFLICT}:
                self._report(key, read, Refused(error.code, error.reason, str(error.body.message)))
                return
            before = self._groups.known(action.request)
            await self._groups.refresh()
            if self._groups.known(action.request) == before:  # another owner has the name
                self._report(key, read, Refused(error.code, error.reason, str(error.body.message)))
                return
            raise EndedError(AT_ONCE_S) from None
        self._refusals.pop(key, None)
        self._groups.answered(action.request, reply)

    def _report(self, key: Key, read: Json, refused: Refused) -> None:
        """Remember a refusal. If its reason is new, end the actions.

        The next reconcile then follows at once, and reports the refusal.
        """
        uid = text(read, "metadata", "uid")
        before = self.refused(key, uid)
        self._refusals[key] = uid, refused
        if before is None or before.reason != refused.reason:
            log.info("%s: %s", key.path, refused.message, extra={"code": "refused"})
            raise EndedError(AT_ONCE_S)


def operations(read: Object, patch: Json) -> list[Json]:
    """Return a JSON patch at the version that was read, so that a concurrent write is a conflict.

    A `status` in `patch` replaces the whole status. A map in `patch`, such as the labels, adds its
    entries to the map of the object.
    """
    version = text(read, "metadata", "resourceVersion")
    changes: dict[tuple[str, ...], Any] = {("metadata", "resourceVersion"): version}
    for part, value in patch.items():
        if part == "status":
            changes[(part,)] = value
            continue
        for name, one in value.items():
            if isinstance(one, dict) and isinstance(at(read, part, name), dict):
                changes |= {(part, name, key): inner for key, inner in one.items()}
            else:
                changes[part, name] = one
    return [
        {"op": "add", "path": pointer(*path), "value": value} for path, value in changes.items()
    ]
