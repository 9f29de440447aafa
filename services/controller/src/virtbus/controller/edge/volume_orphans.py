"""Finds the data of volumes that have no record, and reads the references for new records."""

from collections.abc import AsyncIterator

from virtbus.bus.client.ports import Bus
from virtbus.controller.core.fleet import Fleet
from virtbus.controller.core.volumes import Volumes
from virtbus.schemas import subjects
from virtbus.schemas.audit import AuditFinding
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.node_rpc import HeldResources, HeldVolume, Inspect
from virtbus.schemas.volume_api import VolumeAdopt
from virtbus.schemas.volume_ref import VolumeRef
from virtbus.schemas.wire import validate

ASK_S = 10.0
AFTER_MS = 5_000
PAGES = 100
"""Maximum number of pages that are read from a node."""
KIND = "volume"


class VolumeOrphans:
    """Compares the volumes on a node with their records."""

    def __init__(self, bus: Bus, fleet: Fleet) -> None:
        self._bus = bus
        self._fleet = fleet

    async def findings(self, node: str) -> list[AuditFinding]:
        """Return a finding for each volume of the node without a record.

        The repair of an audit never removes such data. A person adopts or deletes the data by name.
        Raises BusError, VirtbusError.
        """
        return [
            _finding(node, held)
            async for held in self.held(node, "")
            if not _is_recorded(self._fleet.volumes, held, node)
        ]

    async def find(self, want: VolumeAdopt) -> VolumeRef:
        """Return the reference that the node keeps with the data of the requested volume.

        Raises:
            VirtbusError: 404 `no_volume_data`: the node has no such data, or cannot read the
                reference. 503 `pool_gone`: a pool that the node cannot read may have it. 409
                `several_volumes`: the name is of several volumes, and the request has no uid.
            VirtbusError: 409 `held_on_node`: a VM without a record holds the volume.
            BusError: the node does not answer.
        """
        start = f"{want.namespace}.{want.name}."
        found: list[VolumeRef] = []
        unread: set[str] = set()
        async for page in self.pages(want.node, start):
            unread.update(page.unread_pools)
            named = [_checked(one) for one in page.volumes if one.folder.startswith(start)]
            for held in named:
                if held.ref is not None and want.uid in {None, held.ref.uid}:
                    self._refuse_held(held)
                    found.append(held.ref)
            if len(named) < len(page.volumes):
                break
        if not found and unread:
            message = (
                f"{want.node} cannot read its pools {', '.join(sorted(unread))}, which may have "
                "the data; see `virtbus pool list`"
            )
            raise VirtbusError(Code.UNAVAILABLE, "pool_gone", message, after_ms=AFTER_MS)
        if not found:
            message = (
                f"{want.node} has no readable data of {want.namespace}/{want.name}; "
                f"`virtbus node audit {want.node}` lists what there is"
            )
            raise VirtbusError(Code.NOT_FOUND, "no_volume_data", message)
        if len(found) > 1:
            uids = ", ".join(ref.uid for ref in found)
            message = f"{want.node} has several volumes of that name; give the uid of one: {uids}"
            raise VirtbusError(Code.CONFLICT, "several_volumes", message)
        return found[0]

    def _refuse_held(self, held: HeldVolume) -> None:
        node = self._fleet.holding.node_of(held.holder)
        if node:
            message = (
                f"{node} holds VM {held.holder}, which has this volume and no record; `virtbus bus "
                "rebuild` writes back both"
            )
            raise VirtbusError(Code.CONFLICT, "held_on_node", message)

    async def has(self, node: str, ref: VolumeRef) -> bool:
        """Return True if a node has the data of a volume.

        Raises:
            VirtbusError: 503 `pool_gone`: the node cannot read the volume's pool now.
            BusError: the node does not answer.
        """
        async for page in self.pages(node, ref.folder[:-1]):
            folders = [held.folder for held in page.volumes]
            if ref.folder in folders:
                return True
            if ref.pool in page.unread_pools:
                message = f"{node} cannot read its pool {ref.pool}; see `virtbus pool list`"
                raise VirtbusError(Code.UNAVAILABLE, "pool_gone", message, after_ms=AFTER_MS)
            if folders and folders[-1] > ref.folder:
                return False
        return False

    async def held(self, node: str, after: str) -> AsyncIterator[HeldVolume]:
        """Yield the volumes of all `pages`.

        Raises BusError, VirtbusError.
        """
        async for page in self.pages(node, after):
            for held in page.volumes:
                yield _checked(held)

    async def pages(self, node: str, after: str) -> AsyncIterator[HeldResources]:
        """Yield pages of a node's volumes in the order of their folders, from after `after` on.

        Raises BusError, VirtbusError.
        """
        subject = subjects.rpc(node, "imaged", "inspect")
        for _ in range(PAGES):
            ask = Inspect(volumes_after=after)
            page = validate(HeldResources, await self._bus.request(subject, ask, timeout_s=ASK_S))
            yield page
            if not page.more or not page.volumes:
                return
            after = page.volumes[-1].folder


def _checked(held: HeldVolume) -> HeldVolume:
    if held.ref is not None and held.ref.folder != held.folder:
        return HeldVolume(folder=held.folder)
    return held


def _is_recorded(volumes: Volumes, held: HeldVolume, node: str) -> bool:
    """Return True if the volume's record allows data on `node`."""
    nodes = data_nodes(volumes, held.folder)
    return nodes is not None and (not nodes or node in nodes)


def data_nodes(volumes: Volumes, folder: str) -> set[str] | None:
    """Return the nodes on which the volume's record allows data; None without a record."""
    namespace, _, rest = folder.partition(".")
    name, _, uid = rest.partition(".")
    known = volumes.get(namespace, name)
    if known is None or known.record.uid != uid:
        return None
    move = known.record.move
    return {known.record.node, *((move.source, move.target) if move else ())} - {""}


def _finding(node: str, held: HeldVolume) -> AuditFinding:
    namespace, name, uid = held.folder.split(".")
    what = f"data of the volume {namespace}/{name} without a record"
    if held.ref is None:
        return AuditFinding(kind=KIND, uid=uid, what=what)
    what += f": virtbus volume adopt {name} -n {namespace} --node {node}"
    return AuditFinding(kind=KIND, uid=uid, what=what, namespace=namespace, name=name)
