"""Takes snapshots of running guests: imaged keeps the files, libvirt controls the guest (ADR 0061).

Each step can be repeated. The agent stores nothing, because imaged has the journal of the snapshot,
and QEMU reports which files it uses.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

from virtbus.nodeagent import brief_freezes
from virtbus.nodeagent.agent_ports import AgentPorts
from virtbus.nodeagent.core.addresses import target
from virtbus.nodeagent.core.guest_layers import GuestLayers, layers_differ
from virtbus.nodeagent.vm.state import ActorState
from virtbus.schemas.disk import DiskBus
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.node_rpc import WorkState
from virtbus.schemas.operation import STEPS
from virtbus.schemas.snapshot import SnapshotDisk
from virtbus.schemas.snapshot_rpc import SnapshotWork
from virtbus.schemas.vm import VmRecord

log = logging.getLogger(__name__)

LAYER = STEPS["snapshot"][1].name
UNKNOWN = "guest_unknown"
"""The reason of an error after which the caller repeats the step."""
Ask = Callable[[SnapshotWork], Awaitable[WorkState]]


class _Switch(NamedTuple):
    """A switch of the disks of a running guest to new files."""

    guest: ActorState
    work: SnapshotWork
    targets: Mapping[str, str]
    """The libvirt target of each disk, by the disk's name in the work."""
    pins: Mapping[str, str]
    """The paths of the new files' pins, by target."""


class LiveSnapshots:
    """The snapshots of running guests on a node."""

    def __init__(self, tools: AgentPorts, made: Callable[[], None]) -> None:
        """`made` is called when a snapshot has made new layers."""
        self._tools = tools
        self._made = made

    async def ensure(self, work: SnapshotWork, guest: ActorState, ask: Ask) -> WorkState:
        """Do as many of the next steps as possible; return imaged's state.

        Raises:
            VirtbusError: 503 `guest_unknown`: it is unknown which files the guest uses. The caller
                repeats the call. After all other errors, the guest uses the same files as before.
                409 `disk_not_switchable`: the guest lacks a disk, or libvirt does not know the
                disk. 409 `layers_differ`: libvirt names files that the guest does not use. Also
                the errors of imaged and libvirt.
        """
        one = self._switch(work, guest)
        seen = await self._look(guest)
        if seen is None:  # no guest or a lost guest; imaged waits until all QEMUs close the disks
            return await ask(one.work)
        words = ""
        if not seen.uses(one.pins):
            try:
                _refuse_old(one, seen)
                state = await ask(_sized(one, seen))
                if state.state != "working" or state.step != LAYER:
                    return state
                words = await self._take(one)
            except VirtbusError as error:
                if error.reason != UNKNOWN:
                    await self._back(one, ask)
                raise
        state = await ask(one.work.model_copy(update={"switched": True}))
        guest.image.reset()  # imaged now reports other layers
        self._made()
        return state.model_copy(update={"message": words})

    async def cancel(self, work: SnapshotWork, guest: ActorState, ask: Ask) -> WorkState:
        """End the work, or complete it if QEMU uses the new files. Raises as `ensure`."""
        return await self._back(self._switch(work, guest), ask)

    async def _back(self, one: _Switch, ask: Ask) -> WorkState:
        more = {"do": "cancel", "switched": await self._switched(one)}
        return await ask(one.work.model_copy(update=more))

    # --- steps ------------------------------------------------------------------------------
    def _switch(self, work: SnapshotWork, guest: ActorState) -> _Switch:
        record = guest.record
        fixed = {
            disk.name
            for disk in record.spec.domain.devices.disks
            if disk.readonly or disk.device == "cdrom"
        }  # the guest cannot change these disks
        disks = tuple(disk for disk in work.disks if _name(disk, record) not in fixed)
        names = {disk.name: _name(disk, record) for disk in disks}
        targets = targets_of(guest, set(names.values()))
        of_work = {disk: targets[name] for disk, name in names.items()}
        pins = {
            of_work[disk.name]: self._tools.disks.layer_pin(
                record.uid, names[disk.name], work.snapshot.uid
            )
            for disk in disks
        }
        live = work.model_copy(update={"layered": True, "live": True, "disks": disks})
        return _Switch(guest, live, of_work, pins)

    async def _take(self, one: _Switch) -> str:
        """Let QEMU take the new files; return why the guest was not frozen, "" if it was frozen.

        Raises:
            VirtbusError: 503 `guest_unknown`: it is unknown which files QEMU uses. After an error
                of libvirt, QEMU does not use the new files, and never will.
        """
        uid = one.guest.record.uid
        error: VirtbusError | None = None
        for disk in one.work.disks:
            name = _name(disk, one.guest.record)
            await self._tools.disks.pin_layer(uid, name, disk, one.work.snapshot.uid)
        words = await brief_freezes.freeze(self._tools.freezes, uid)
        try:
            await self._tools.layers.switch(uid, one.pins)
        except VirtbusError as failed:
            error = failed
        finally:
            if not words:
                await brief_freezes.thaw(self._tools.freezes, uid, "the snapshot is taken")
        if error is not None and not await self._switched(one):
            raise error
        return words

    async def _switched(self, one: _Switch) -> bool:
        """Return True if QEMU uses the new files; False if QEMU never will.

        The pins of the new files are removed first, so that QEMU cannot open these files later.

        Raises:
            VirtbusError: 503 `guest_unknown`: it is unknown which files QEMU uses.
        """
        uid = one.guest.record.uid
        for pin in one.pins.values():
            await self._tools.disks.unpin(pin)
        seen = await self._look(one.guest)
        if seen is None:
            raise _unknown("the guest ended meanwhile, and imaged finds out what its disks have")
        if not seen.uses(one.pins):
            return False
        for disk in one.work.disks:
            name = _name(disk, one.guest.record)
            await self._tools.disks.pin_layer(uid, name, disk, one.work.snapshot.uid)
        return True

    async def _look(self, guest: ActorState) -> GuestLayers | None:
        try:
            return await self._tools.layers.look(guest.record.uid)
        except VirtbusError as error:
            if error.code != Code.UNAVAILABLE:
                raise
            raise _unknown(str(error)) from error


def _refuse_old(one: _Switch, seen: GuestLayers) -> None:
    """Raise 409 `layers_differ` if libvirt's XML names files that QEMU does not use.

    Raise 409 `disk_not_switchable` if the XML lacks a disk.
    """
    if seen.differs:
        raise layers_differ()
    missing = sorted(set(one.pins) - seen.named.keys())
    if missing:
        message = (
            "the running guest does not have all disks as the VM's record says "
            f"({', '.join(missing)}); repeat when `virtbus vm get` shows nothing pending"
        )
        raise VirtbusError(Code.CONFLICT, "disk_not_switchable", message)


def _sized(one: _Switch, seen: GuestLayers) -> SnapshotWork:
    disks = [
        disk.model_copy(update={"size_bytes": seen.used[seen.named[one.targets[disk.name]]]})
        for disk in one.work.disks
    ]
    return one.work.model_copy(update={"disks": tuple(disks)})


def _name(disk: SnapshotDisk, record: VmRecord) -> str:
    """Return the name of a snapshot's disk in the spec of the VM."""
    if disk.ref is None:
        return disk.name
    of = (name for name, ref in record.volume_refs.items() if ref.uid == disk.ref.uid)
    return next(of, disk.name)


def targets_of(guest: ActorState, names: set[str]) -> dict[str, str]:
    """Return the libvirt targets of the disks `names` of a running guest, by name.

    Raises:
        VirtbusError: 409 `disk_not_switchable`: a disk is on nvme, or the guest lacks a disk. 503
            `guest_unknown`: a disk is being attached.
    """
    spec, known = guest.record.spec, guest.observed.disks
    found, attached_soon = {}, []
    for disk in spec.domain.devices.disks:
        if disk.name not in names:
            continue
        if disk.bus is DiskBus.NVME:
            message = (
                f"the disk {disk.name} cannot be frozen while the guest runs, because libvirt "
                "does not know disks on nvme; stop the VM, then repeat"
            )
            raise VirtbusError(Code.CONFLICT, "disk_not_switchable", message)
        try:
            found[disk.name] = target(disk, known.addresses)
        except KeyError:
            if disk.name not in known.pending:
                attached_soon.append(disk.name)
    if refused := sorted(names - found.keys() - set(attached_soon)):
        why = known.pending.get(refused[0], "it is not a disk of the VM")
        message = f"the running guest does not have the disk {refused[0]}: {why}"
        raise VirtbusError(Code.CONFLICT, "disk_not_switchable", message)
    if attached_soon:
        raise _unknown(f"the disk {attached_soon[0]} is being attached")
    return found


def _unknown(why: str) -> VirtbusError:
    message = f"nobody knows which files the guest uses: {why}; the agent repeats this"
    return VirtbusError(Code.UNAVAILABLE, UNKNOWN, message)
