"""Describes a running guest's disks for backups and readings, and makes the errors of both.

In a reading, QEMU serves the disks of one instant to a client.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from virtbus.nodeagent.agent_ports import AgentPorts
from virtbus.nodeagent.core.guest_layers import GuestLayers, layers_differ
from virtbus.nodeagent.live_snapshots import UNKNOWN, targets_of
from virtbus.nodeagent.vm.state import ActorState
from virtbus.schemas.backup import BackedDisk, BackupWork
from virtbus.schemas.errors import Code, VirtbusError

LATER = frozenset({"recovering", UNKNOWN})
"""Error reasons after which the caller only repeats the step, without a clean-up."""


class CopiedDisks(NamedTuple):
    """The disks of a running guest."""

    targets: Mapping[str, str]
    """libvirt's name of each disk (`vda`), by the disk's name in the spec."""
    disks: tuple[BackedDisk, ...]
    """The disks with the sizes that the guest sees."""


async def copied_disks(
    tools: AgentPorts, guest: ActorState | None, work: BackupWork
) -> CopiedDisks:
    """Return the disks of `work` with their sizes, if QEMU can copy them now.

    Raises:
        VirtbusError: 409 `guest_ended`: the guest does not run.
            409 `layers_differ`: libvirt's XML names a file that QEMU does not use.
            409 `disk_not_switchable`: a disk is no file of the node, is on nvme, or is missing in
            the guest.
        VirtbusError: 503 `guest_unknown`: libvirt does not answer, or a disk is being attached.
    """
    with asked_again():
        seen = None if guest is None else await tools.layers.look(work.uid)
    if guest is None or seen is None:
        raise guest_ended()
    if seen.differs:
        raise layers_differ()
    targets = targets_of(guest, {disk.name for disk in work.disks})
    _refuse_others(targets, seen)
    sizes = {name: seen.used[seen.named[targets[name]]] for name in targets}
    disks = (disk.model_copy(update={"size_bytes": sizes[disk.name]}) for disk in work.disks)
    return CopiedDisks(targets, tuple(disks))


@contextlib.contextmanager
def asked_again() -> Iterator[None]:
    """Turn each 503 of the block into 503 `guest_unknown`: the caller then repeats the step."""
    try:
        yield
    except VirtbusError as error:
        if error.code != Code.UNAVAILABLE:
            raise
        raise unknown(str(error)) from error


def unknown(why: str) -> VirtbusError:
    """Return 503 `guest_unknown`."""
    message = f"nobody knows what the guest's QEMU does: {why}; the agent repeats this"
    return VirtbusError(Code.UNAVAILABLE, UNKNOWN, message)


def guest_ended() -> VirtbusError:
    """Return 409 `guest_ended`."""
    message = "the guest ended before its disks were copied; repeat the backup"
    return VirtbusError(Code.CONFLICT, "guest_ended", message)


def _refuse_others(targets: Mapping[str, str], seen: GuestLayers) -> None:
    """Raise 409 `disk_not_switchable` if libvirt's XML has no file for a disk.

    `targets` has libvirt's name of each disk, by the disk's name in the spec.
    """
    if others := sorted(name for name, target in targets.items() if target not in seen.named):
        message = (
            f"the guest's disk {others[0]} is not a file of the node, so QEMU cannot write its "
            "backup; detach the volume, or use the backups of its storage"
        )
        raise VirtbusError(Code.CONFLICT, "disk_not_switchable", message)
