"""Sets the limits of a running guest's disks."""

from virtbus.nodeagent.core.disk_drivers import limit_calls, shown_limits
from virtbus.nodeagent.core.disks import targets
from virtbus.nodeagent.core.metadata import volume_names
from virtbus.nodeagent.core.plugs import GuestDisks
from virtbus.nodeagent.core.ports import Hypervisor
from virtbus.schemas.vm import VmRecord


async def limit(
    record: VmRecord, hypervisor: Hypervisor, known: GuestDisks
) -> dict[str, dict[str, int]]:
    """Set the limits; return the limits in force, by the name of each disk that has limits.

    `known` are the guest's disks. A volume that is not attached yet is skipped, because the
    attachment sets its limits.

    Raises:
        VirtbusError: libvirt does not answer, or refuses a limit.
    """
    disks, volumes = record.spec.domain.devices.disks, {one.name for one in record.spec.volumes}
    absent = volume_names(record) - known.hashes.keys()
    at = targets(record.spec.domain, known.addresses)
    # QEMU has no limits for an empty drive
    full = {at[disk.name]: disk for disk in disks if disk.name in volumes - absent}
    figures = await hypervisor.limit(record.uid, limit_calls(full))
    found = {full[target].name: shown_limits(one) for target, one in (figures or {}).items()}
    return {name: limits for name, limits in found.items() if limits}
