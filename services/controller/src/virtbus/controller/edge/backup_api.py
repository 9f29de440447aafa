"""Handles `virtbus.api.v1.backup.*`, the requests about backups.

Backups have no records on the bus. The nodes' directories alone describe them (ADR 0068).
"""

import logging

from virtbus.bus.client.endpoints import in_time
from virtbus.bus.client.owners import check_owner, may_touch
from virtbus.bus.client.ports import Bus, Handler, Request
from virtbus.controller.core import backup_changes, resting, snapshot_changes
from virtbus.controller.core.fleet import Fleet
from virtbus.controller.edge.backup_directories import BackupDirectories
from virtbus.controller.edge.operation_api import OperationApi
from virtbus.controller.edge.vm_api import VmApi
from virtbus.schemas.api import VmRef
from virtbus.schemas.backup import BackupsAsk, HeldBackup, HeldBackups
from virtbus.schemas.backup_api import (
    BackupAsk,
    BackupCreate,
    BackupFinish,
    BackupList,
    BackupPage,
    BackupServe,
    BackupVerify,
    BackupView,
)
from virtbus.schemas.operation_api import OperationView
from virtbus.schemas.wire import validate

log = logging.getLogger(__name__)

ANSWER_S = 1.0
"""`list` and `_find` stop waiting for nodes this long before the request's deadline. They then
continue without the nodes that have not answered."""
MOST = 500
"""Limit of backups in one answer. Each backup takes at most 1 KiB."""


class BackupApi:
    """The handlers of `backup.*`; each takes a Request and returns the answer's model."""

    def __init__(self, bus: Bus, fleet: Fleet, vms: VmApi, operations: OperationApi) -> None:
        self._bus = bus
        self._directories = BackupDirectories(bus, fleet)
        self._vms = vms
        self._operations = operations

    @property
    def handlers(self) -> dict[str, Handler]:
        """Return the handlers by verb."""
        return {
            "create": self.create,
            "get": self.get,
            "list": self.list,
            "verify": self.verify,
            "delete": self.delete,
            "serve": self.serve,
            "finish": self.finish,
        }

    async def create(self, request: Request) -> OperationView:
        """Accept a backup, which the VM's node then makes."""
        want = validate(BackupCreate, request.data)
        vm = await self._vms.find(VmRef(name=want.vm, namespace=want.namespace), request.account)
        snapshot_changes.refuse_pools(vm.record.volume_refs.values(), "backups")
        snapshot_changes.refuse_devices(vm.record.spec)
        fields = resting.of_vm(vm.record, self._vms.show(vm).state, live=True)
        await self._directories.refuse_off(vm.record.node)
        id_ = want.id or self._bus.sources.uuid7()
        record = backup_changes.creating(want, fields, id_, self._bus.sources.time_ns())
        return await self._operations.begin(record, request.deadline_s)

    async def serve(self, request: Request) -> OperationView:
        """Accept an operation in which a client reads the disks of a running VM (ADR 0079)."""
        want = validate(BackupServe, request.data)
        vm = await self._vms.find(VmRef(name=want.vm, namespace=want.namespace), request.account)
        snapshot_changes.refuse_pools(vm.record.volume_refs.values(), "backups")
        snapshot_changes.refuse_devices(vm.record.spec)
        state = self._vms.show(vm).state
        fields = resting.of_vm(vm.record, state, live=True)
        backup_changes.refuse_off(vm.record.name, state)
        id_ = want.id or self._bus.sources.uuid7()
        record = backup_changes.serving(want, fields, id_, self._bus.sources.time_ns())
        return await self._operations.begin(record, request.deadline_s)

    async def finish(self, request: Request) -> OperationView:
        """End an operation of `serve` with success. The answer may still show it as Running."""
        want = validate(BackupFinish, request.data)
        return await self._operations.finish(want.id, request.account)

    async def verify(self, request: Request) -> OperationView:
        """Accept the verification of a backup on a node that has it."""
        want = validate(BackupVerify, request.data)
        view, owner = await self._find(want, request)
        id_ = want.operation or self._bus.sources.uuid7()
        record = backup_changes.verifying(view, id_, owner, self._bus.sources.time_ns())
        return await self._operations.begin(record, request.deadline_s)

    async def get(self, request: Request) -> BackupView:
        want = validate(BackupAsk, request.data)
        return (await self._find(want, request))[0]

    async def delete(self, request: Request) -> BackupView:
        """Remove a backup. Its node refuses the removal while another backup rests on it."""
        want = validate(BackupAsk, request.data)
        view, _ = await self._find(want, request)
        async with in_time(request.deadline_s):
            await self._directories.ask(view.node, BackupsAsk(do="delete", id=view.id))
        log.info("backup %s deleted", view.id, extra={"code": "backup_deleted", "uid": view.uid})
        return view

    async def list(self, request: Request) -> BackupPage:
        want = validate(BackupList, request.data)

        async def selected(node: str) -> list[BackupView]:
            return [
                backup_changes.shown(node, held)
                async for held in self._directories.held(node)
                if backup_changes.selected(want, held)
                and may_touch(request.account, _owner_of(held))
            ]

        nodes = self._directories.nodes(want.node)
        lists = await self._directories.each(nodes, selected, request.deadline_s - ANSWER_S)
        found: dict[str, BackupView] = {}
        for node in sorted(lists):
            for view in lists[node]:
                found.setdefault(view.id, view)
        silent = [node for node in nodes if node not in lists]
        items = tuple(found[id_] for id_ in sorted(found))
        return BackupPage(items=items[-MOST:], silent=tuple(silent), truncated=len(items) > MOST)

    # --- shared ---------------------------------------------------------------------------
    async def _find(self, want: BackupAsk, request: Request) -> tuple[BackupView, str]:
        """Return a backup and its owner.

        Raises:
            VirtbusError:
                403: the account may not use the backup.
                404: no node has the backup, or the requested node is unknown.
                503: a node that may have the backup did not answer.
        """

        async def ask(node: str) -> HeldBackups:
            return await self._directories.ask(node, BackupsAsk(do="get", id=want.id))

        nodes, until_s = self._directories.nodes(want.node), request.deadline_s - ANSWER_S
        found = await self._directories.each(nodes, ask, until_s, lambda one: bool(one.items))
        for node in sorted(found):
            for held in found[node].items:
                check_owner(request.account, _owner_of(held))
                return backup_changes.shown(node, held, whole=True), _owner_of(held)
        raise backup_changes.not_found(want.id, [node for node in nodes if node not in found])


def _owner_of(held: HeldBackup) -> str:
    return "" if held.manifest is None else held.manifest.owner
