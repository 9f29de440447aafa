"""Detaches, grows and attaches the disks of a running guest, as its record says.

The record names the disks that the guest should have. libvirt's XML shows the disks that the guest
has. So each step can be repeated after a crash of the agent or of libvirtd.
"""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from virtbus.nodeagent.agent_ports import AgentPorts
from virtbus.nodeagent.core.addresses import SCSI, Addresses, assigned, of_disk, target
from virtbus.nodeagent.core.disk_sources import DiskSource
from virtbus.nodeagent.core.disks import hot_disk, scsi_controller, volume_alias
from virtbus.nodeagent.core.element import to_text
from virtbus.nodeagent.core.logins import logins_of
from virtbus.nodeagent.core.metadata import disk_hashes, volume_names
from virtbus.nodeagent.core.plugs import GuestDevices, GuestDisks, wanted_sizes
from virtbus.nodeagent.vm.dependencies import Dependency
from virtbus.schemas.disk import Disk, DiskBus
from virtbus.schemas.disk_buses import ABILITIES, Verb
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.node_rpc import ImageReady
from virtbus.schemas.pool import ON_DEVICES
from virtbus.schemas.vm import VmRecord
from virtbus.schemas.volume_ref import VolumeRef

UNPLUG_POLLS_S = (0.05, 0.1, 0.2, 0.4, 0.8)
"""The delays between checks of a disk that the guest was asked to release. A running guest usually
releases the disk within the sum of the delays. If it does not, a later round asks again."""
IMAGED_S = 10.0
BUSY = "the guest has not released it; the request is repeated"
PAUSED = "the guest is paused, so it cannot release it; `virtbus vm unpause` resumes it"
OPEN = "libvirt has detached it, but a QEMU of this host has its file open; stop the VM"
NO_PORT = "the guest has no free PCI port; stop and start the VM, or use the bus scsi"


async def change_disks(
    record: VmRecord, image: Dependency[ImageReady], tools: AgentPorts, known: GuestDisks
) -> GuestDisks:
    """Make the changes that are possible now; return the guest's disks and the pending changes.

    `known` are the guest's disks before the changes.
    """
    try:
        found = await tools.plugs.devices(record.uid)
        guest = found or GuestDevices()
        known = _with_unanswered(known, guest)
        gone, waits = await _unplug(record, guest, tools)
        waits |= await _grow(record, guest, image, tools, known.addresses)
    except VirtbusError as error:
        names = {*record.detaching, *known.pending} or {"disks"}
        return replace(known, pending=dict.fromkeys(names, f"tried again: {error}"))
    missing = [disk for disk in _volume_disks(record) if not guest.has(volume_alias(disk.name))]
    absent = gone if found is None else gone.union(disk.name for disk in missing)
    now = _lacking(absent, GuestDisks(known.addresses, known.hashes, gone, waits))
    if not missing or found is None:
        return now
    return await _plug(record, guest, missing, image, tools, now)


def _with_unanswered(known: GuestDisks, guest: GuestDevices) -> GuestDisks:
    """Add the disks that the guest has although their attach failed with an error.

    A libvirtd that is killed after it has attached a disk sends no answer. The addresses and the
    hash of such a disk are in the domain's metadata.
    """
    unanswered = {
        name
        for name in guest.noted_hashes
        if name not in known.hashes and guest.has(volume_alias(name))
    }
    if not unanswered:
        return known
    keys = {*unanswered, *map(of_disk, unanswered)}
    addresses = {pool: dict(numbers) for pool, numbers in known.addresses.items()}
    for pool, numbers in guest.noted_addresses.items():
        found = {key: number for key, number in numbers.items() if key in keys}
        if found:
            addresses[pool] = addresses.get(pool, {}) | found
    hashes = {name: guest.noted_hashes[name] for name in unanswered}
    return replace(known, addresses=addresses, hashes={**known.hashes, **hashes})


def _volume_disks(record: VmRecord) -> list[Disk]:
    names = volume_names(record)
    return [disk for disk in record.spec.domain.devices.disks if disk.name in names]


async def _unplug(
    record: VmRecord, guest: GuestDevices, tools: AgentPorts
) -> tuple[frozenset[str], dict[str, str]]:
    """Detach the disks of `record.detaching`.

    Return the names of the disks that are gone, and by name the reasons why the others wait. A disk
    is gone if QEMU has reported to libvirt that its device is gone, and no QEMU has its file open.
    """
    gone, waits = set(), {}
    for name, ref in record.detaching.items():
        try:
            why = await _released(record, name, ref, guest, tools)
        except VirtbusError as error:
            why = f"tried again: {error}"
        if why:
            waits[name] = f"Detaching: {why}"
        else:
            gone.add(name)
    return frozenset(gone), waits


async def _released(
    record: VmRecord, name: str, ref: VolumeRef, guest: GuestDevices, tools: AgentPorts
) -> str:
    """Ask the guest to release a disk; return why the guest still has it, empty if released."""
    alias = volume_alias(name)
    if guest.has(alias):
        await tools.plugs.detach(record.uid, alias)
        for delay_s in UNPLUG_POLLS_S:
            await asyncio.sleep(delay_s)
            now = await tools.plugs.devices(record.uid)
            if now is None or not now.has(alias):
                break
        else:
            return PAUSED if record.paused else BUSY
    if not await tools.disks.opened(record.uid, ref):
        return ""
    await tools.plugs.close_left(record.uid)
    return OPEN if await tools.disks.opened(record.uid, ref) else ""


async def _grow(
    record: VmRecord,
    guest: GuestDevices,
    image: Dependency[ImageReady],
    tools: AgentPorts,
    addresses: Addresses,
) -> dict[str, str]:
    """Grow the disks whose bus can report a new size to a running guest.

    Return the reasons for the disks that could not be grown, by name.
    """
    waits = {}
    sizes, volumes = wanted_sizes(record), volume_names(record)
    for disk in record.spec.domain.devices.disks:
        here = disk.name not in volumes or guest.has(volume_alias(disk.name))
        fixed = disk.device == "cdrom" or disk.readonly
        if disk.name not in sizes or not here or fixed or ABILITIES[disk.bus][Verb.GROW].refused:
            continue
        try:
            ref = record.volume_refs.get(disk.name)
            if ref is not None and ref.kind in ON_DEVICES:  # imaged grows the volume first
                await _files(record, image, tools)
            at = target(disk, addresses)
            await tools.plugs.grow(record.uid, {at: sizes[disk.name]})
        except (VirtbusError, KeyError) as error:
            waits[disk.name] = f"Growing: the agent retries: {error}"
    return waits


async def _plug(
    record: VmRecord,
    guest: GuestDevices,
    missing: Sequence[Disk],
    image: Dependency[ImageReady],
    tools: AgentPorts,
    now: GuestDisks,
) -> GuestDisks:
    """Attach the missing disks; return the guest's disks and the pending changes.

    The metadata gets the disks' addresses first, so that a repetition uses the same addresses.
    """
    names = {disk.name for disk in missing}
    try:
        files = await _files(record, image, tools)
        addresses = assigned(
            record.spec.domain, now.addresses, leaving=record.detaching, busy=guest.ports
        )
        hashes = disk_hashes(record)
        noted = {**now.hashes, **{name: hashes[name] for name in names}}
        await tools.plugs.note(record.uid, addresses, noted)
    except VirtbusError as error:
        waits = dict.fromkeys(names, f"Attaching: tried again: {error}")
        return replace(now, pending={**now.pending, **waits})
    waits = {}
    has_scsi = guest.has_scsi
    for disk in missing:
        devices = [hot_disk(disk, files[disk.name], addresses)]
        if disk.bus is DiskBus.SCSI and not has_scsi:
            devices.insert(0, scsi_controller(addresses))
        port = addresses["port"].get(SCSI if len(devices) > 1 else of_disk(disk.name), 0)
        try:
            if port > guest.root_ports:
                waits[disk.name] = f"Attaching: {NO_PORT}"
                continue
            async with tools.logins.lent(logins_of({disk.name: files[disk.name]})):
                await tools.plugs.attach(record.uid, [to_text(one) for one in devices])
            has_scsi |= disk.bus is DiskBus.SCSI
        except VirtbusError as error:
            waits[disk.name] = f"Attaching: tried again: {error}"
            with suppress(VirtbusError):  # a killed libvirtd may have left the disk open in QEMU
                await tools.plugs.close_left(record.uid)
    after = replace(now, addresses=addresses, hashes=noted, pending={**now.pending, **waits})
    return _lacking(waits.keys(), after)


async def _files(
    record: VmRecord, image: Dependency[ImageReady], tools: AgentPorts
) -> Mapping[str, DiskSource]:
    """Return the checked files of the VM's disks; raise VirtbusError until imaged has made them."""
    try:
        async with asyncio.timeout(IMAGED_S):
            made = await image.get(record, ask_after_s=tools.settings.ask_after_s)
    except TimeoutError:
        message = image.silence or "imaged has not made the disk yet"
        raise VirtbusError(Code.UNAVAILABLE, "no_image", message) from None
    return await tools.disks.sources(record, made.disks, running=True)


def _lacking(names: Collection[str], known: GuestDisks) -> GuestDisks:
    """Return the guest's disks without the addresses and hashes of the disks `names`.

    The guest has none of these disks, so that it is asked neither for their limits nor for their
    files.
    """
    gone = {*names, *map(of_disk, names)}
    addresses = {
        pool: {name: number for name, number in numbers.items() if name not in gone}
        for pool, numbers in known.addresses.items()
    }
    hashes = {name: one for name, one in known.hashes.items() if name not in gone}
    return replace(known, addresses=addresses, hashes=hashes)
