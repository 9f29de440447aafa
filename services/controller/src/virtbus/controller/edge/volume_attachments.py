"""Handles attach, detach and growth of volumes; one batch changes the VM and the volume."""

import logging
from collections.abc import Iterable

from virtbus.bus.client.endpoints import in_time
from virtbus.bus.client.ports import Bus, Request
from virtbus.bus.errors import BusError, ConflictError
from virtbus.controller.core.fleet import Fleet
from virtbus.controller.core.unreadable import UnreadableValueError
from virtbus.controller.core.vm_keys import StoredVm, StoredVolume
from virtbus.controller.core.volume_attachment import (
    attached,
    detached,
    disks_of,
    grown,
    is_off,
    refuse_mounted,
)
from virtbus.controller.core.volume_changes import held_by, refuse_deleting, refuse_shrink
from virtbus.controller.core.volume_holds import freed, ref_of
from virtbus.controller.edge.cas import contended
from virtbus.controller.edge.key_states import ended
from virtbus.controller.edge.vm_api import VmApi
from virtbus.controller.edge.volume_api import VolumeApi
from virtbus.controller.edge.volume_writes import VolumeWrites
from virtbus.schemas import subjects
from virtbus.schemas.api import VmRef
from virtbus.schemas.disk import Disk
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.events import EventKind
from virtbus.schemas.guest import GuestAsk, GuestInfo, GuestQuestion
from virtbus.schemas.ids import UNPLACED
from virtbus.schemas.vm import VmRecord
from virtbus.schemas.volume import VolumeRecord
from virtbus.schemas.volume_api import (
    VolumeAsk,
    VolumeAttach,
    VolumeDetach,
    VolumeUpdate,
    VolumeView,
)
from virtbus.schemas.volume_ref import VolumeRef
from virtbus.schemas.wire import validate

log = logging.getLogger(__name__)

ASK_GUEST_S = 2.0


class VolumeAttachments:
    """The handlers. Each changes the VM's record; the VM's agent then changes the running guest."""

    def __init__(self, bus: Bus, fleet: Fleet, vms: VmApi, volumes: VolumeApi) -> None:
        self._bus = bus
        self._fleet = fleet
        self._vms = vms
        self._volumes = volumes

    async def attach(self, request: Request) -> VolumeView:
        want = validate(VolumeAttach, request.data)
        volume = (await self._volumes.find(want, request.account)).record
        disk = Disk(name=want.disk or want.name, bus=want.bus)

        def change(record: VmRecord) -> VmRecord:
            self._fleet.pools.refuse_attach(record.node, volume)
            return attached(record, self._fleet.last_status(record), volume, disk)

        of_vm = VmRef(name=want.vm, namespace=want.namespace)
        view = await self._vms.change(of_vm, change, request)
        return await self._answer(want, request, f"attached to {view.name}")

    async def detach(self, request: Request) -> VolumeView:
        want = validate(VolumeDetach, request.data)
        try:
            held = await self._volumes.find(want, request.account)
        except UnreadableValueError as error:
            if want.gone is None:
                raise
            held = self._volumes.last_readable(want, error, request.account)
        if not held.record.holder:
            return self._volumes.show(held)
        if want.gone is not None:
            await self._end_hold(held, want.gone)
            return await self._answer(
                want, request, f"a person confirmed that VM {want.gone} is gone"
            )
        vm = await self._holder(want, held.record, request.account)
        if vm is None:
            return self._volumes.show(held)
        if not want.force:
            await self._refuse_mounted(vm.record, held.record, request.deadline_s)
        view = await self._vms.change(
            VmRef(uid=vm.record.uid),
            lambda record: detached(record, self._fleet.last_status(record), held.record),
            request,
        )
        leaves = f"waits until the guest of {view.name} has released it"
        still = held.record.uid in {ref.uid for ref in await self._refs(vm.record.uid)}
        return await self._answer(want, request, leaves if still else f"detached from {view.name}")

    async def _holder(
        self, want: VolumeDetach, record: VolumeRecord, account: str
    ) -> StoredVm | None:
        """Return the VM that must release the volume.

        Return None if the volume is shared, and the requested VM does not hold it.

        Raises:
            VirtbusError:
                404: the VM does not exist.
                409 `several_holders`: several VMs hold the volume, and the request names no VM.
                409 `not_its_holder`: the holder is not the requested VM.
        """
        if record.spec.is_shared and want.vm is not None:
            of_vm = VmRef(name=want.vm, namespace=want.namespace)
            vm = await self._vms.find(of_vm, account)
            return vm if vm.record.uid in record.holders else None
        if len(record.holders) > 1:
            vms = (self._fleet.vms.get(uid) for uid in record.holders)
            names = {vm.record.uid: vm.record.name for vm in vms if vm is not None}
            message = (
                f"{held_by(record, names)} {want.name}; name the VM that gives it up: `virtbus "
                f"volume detach {want.name} VM -n {want.namespace}`"
            )
            raise VirtbusError(Code.CONFLICT, "several_holders", message)
        vm = await self._vms.find(VmRef(uid=record.holder), account)
        if want.vm not in {None, vm.record.name}:
            message = f"VM {vm.record.name} holds {want.name}, not {want.vm}; leave the VM out"
            raise VirtbusError(Code.CONFLICT, "not_its_holder", message)
        return vm

    async def update(self, request: Request) -> VolumeView:
        """Grow the volume together with its holder's record; then make all other changes."""
        want = validate(VolumeUpdate, request.data)
        record = (await self._volumes.find(want, request.account)).record
        size_bytes = want.size
        if size_bytes is not None and size_bytes != record.spec.size and record.holder:
            refuse_deleting(record)
            refuse_shrink(record, size_bytes)
            self._volumes.room.refuse_growth(record, size_bytes)
            vm = await self._vms.find(VmRef(uid=record.holder), request.account)
            larger: int = size_bytes
            view = await self._vms.change(
                VmRef(uid=vm.record.uid),
                lambda one: grown(one, self._fleet.last_status(one), record, larger),
                request,
            )
            await self._answer(want, request, f"grows in {view.name}")
        return await self._volumes.update(request)

    async def _refs(self, vm: str) -> Iterable[VolumeRef]:
        return (await self._vms.find(VmRef(uid=vm), "")).record.volume_refs.values()

    async def _refuse_mounted(self, vm: VmRecord, volume: VolumeRecord, deadline_s: float) -> None:
        """Raise 409 if the guest agent reports mounted file systems of the volume.

        Without an answer of the guest agent, the detach continues.
        """
        names = disks_of(vm, ref_of(volume)) - vm.detaching.keys()
        if not names or vm.node == UNPLACED or is_off(vm, self._fleet.last_status(vm)):
            return
        ask = GuestAsk(uid=vm.uid, about=(GuestQuestion.FILESYSTEMS,), timeout_s=ASK_GUEST_S)
        subject = subjects.rpc(vm.node, "agent", "guest")
        try:
            async with in_time(deadline_s):
                answer = await self._bus.request(subject, ask, timeout_s=ASK_GUEST_S + 1)
            info = validate(GuestInfo, answer)
        except (BusError, VirtbusError) as error:
            log.info("the guest does not say what it has mounted: %s", error, extra={"uid": vm.uid})
            return
        refuse_mounted(vm, volume, info, names)

    async def _end_hold(self, held: StoredVolume, vm: str) -> None:
        """End the hold of a VM without a record, after a person confirmed that its guest is gone.

        Raises:
            VirtbusError:
                409 `not_its_holder`: the VM does not hold the volume.
                409 `not_gone`: the VM has a record, or a node holds the VM without a record.
                503 `contended`: the volume changed meanwhile.
        """
        record, node = held.record, self._fleet.holding.node_of(vm)
        free = freed(held, ref_of(record), vm)
        if free is None:
            message = f"{held_by(record)} {record.name}, not {vm}"
            raise VirtbusError(Code.CONFLICT, "not_its_holder", message)
        if node or not ended(await self._bus.get(subjects.vm_anywhere(vm))):
            there = f"is held on {node}" if node else "has a record"
            message = f"VM {vm} {there}; delete that VM, or stop it and detach the volume"
            raise VirtbusError(Code.CONFLICT, "not_gone", message)
        try:
            await VolumeWrites(self._bus).replace(held, free)
        except ConflictError:
            raise contended(f"the volume {record.name}") from None

    async def _answer(self, want: VolumeAsk, request: Request, message: str) -> VolumeView:
        """Read the volume after the change, emit its event, and return it."""
        held: StoredVolume = await self._volumes.find(want, request.account)
        self._volumes.tell(EventKind.VOLUME_UPDATED, held, message)
        return self._volumes.show(held)
