"""Finds the data of snapshots that have no record, so that a person can adopt it."""

from collections.abc import AsyncIterator

from virtbus.bus.client.ports import Bus
from virtbus.controller.core.snapshots import Snapshots
from virtbus.schemas import subjects
from virtbus.schemas.audit import AuditFinding
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.node_rpc import HeldResources, HeldSnapshot, Inspect
from virtbus.schemas.snapshot_api import SnapshotAdopt
from virtbus.schemas.wire import validate

ASK_S = 10.0
PAGES = 100
"""Limit of pages that are read from a node."""
KIND = "snapshot"


class SnapshotOrphans:
    """Compares the snapshots on a node with their records."""

    def __init__(self, bus: Bus, snapshots: Snapshots) -> None:
        self._bus = bus
        self._snapshots = snapshots

    async def findings(self, node: str) -> list[AuditFinding]:
        """Return a finding for each snapshot of the node without a record; raises BusError.

        An audit never repairs such a finding: a person adopts or deletes the snapshot by its name.
        """
        found = []
        async for held in self._held(node, ""):
            namespace, name, uid = held.folder.split(".")
            known = self._snapshots.get(namespace, name)
            if known is not None and known.record.uid == uid:
                continue
            what, whose = f"data of the snapshot {namespace}/{name} without a record", {}
            if held.ref is not None:
                what += f": virtbus snapshot adopt {name} -n {namespace} --node {node}"
                whose = {"namespace": namespace, "name": name}
            found.append(AuditFinding(kind=KIND, uid=uid, what=what, **whose))
        return found

    async def find(self, want: SnapshotAdopt) -> HeldSnapshot:
        """Return the node's description of the requested data.

        Raises:
            VirtbusError:
                404: the node lacks the data, or the data is incomplete.
                409: several snapshots on the node match.
            BusError: the node does not answer.
        """
        start = f"{want.namespace}.{want.name}."
        found = []
        async for held in self._held(want.node, start):
            if not held.folder.startswith(start):
                break
            if held.ref is not None and want.uid in {None, held.ref.uid}:
                found.append(held)
        if not found:
            message = (
                f"{want.node} has no complete snapshot {want.namespace}/{want.name}; "
                f"`virtbus node audit {want.node}` lists what there is"
            )
            raise VirtbusError(Code.NOT_FOUND, "no_snapshot_data", message)
        if len(found) > 1:
            uids = ", ".join(held.folder.rpartition(".")[2] for held in found)
            message = f"{want.node} has several snapshots of that name; give the uid of one: {uids}"
            raise VirtbusError(Code.CONFLICT, "several_snapshots", message)
        return found[0]

    async def _held(self, node: str, after: str) -> AsyncIterator[HeldSnapshot]:
        """Yield the snapshots on a node whose folder sorts after `after`, sorted by folder.

        A description that names another folder is left out.
        """
        subject = subjects.rpc(node, "imaged", "inspect")
        for _ in range(PAGES):
            ask = Inspect(snapshots_after=after)
            page = validate(HeldResources, await self._bus.request(subject, ask, timeout_s=ASK_S))
            for held in page.snapshots:
                foreign = held.ref is not None and held.ref.folder != held.folder
                yield HeldSnapshot(folder=held.folder) if foreign else held
            if not page.more or not page.snapshots:
                return
            after = page.snapshots[-1].folder
