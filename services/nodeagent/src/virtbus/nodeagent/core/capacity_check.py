"""Checks that a new VM fits next to the node's other VMs.

Controllers place VMs by caches. Two controllers at once, or an outdated cache, may assign too much
to a node. The node therefore checks again before it prepares the VM.
"""

from virtbus.nodeagent.core.ports import HostFacts
from virtbus.schemas.quantity import format_bytes
from virtbus.schemas.vm import VmRecord


def promised_bytes(record: VmRecord) -> int:
    """Return the host memory of the VM's guest: 0 while the VM is off."""
    return record.spec.domain.memory.guest if record.powered else 0


def no_room(record: VmRecord, others_bytes: int, host: HostFacts) -> str:
    """Return the reason to refuse the VM, as in "has 1 GiB of memory left", or an empty string.

    This check refuses only impossible VMs: too much memory for the host with all its VMs, or too
    many vCPUs for a guest.
    """
    if not record.powered:
        return ""
    wanted = record.spec.domain.cpu.vcpus
    if host.max_vcpus and wanted > host.max_vcpus:
        return f"runs at most {host.max_vcpus} vCPUs in a VM, {wanted} asked"
    free = max(host.memory_bytes - others_bytes, 0)
    guest = record.spec.domain.memory.guest
    if guest > free:
        return f"has {format_bytes(free)} of memory left, {format_bytes(guest)} asked"
    return ""
