"""Checks that a VM that is new to this node fits next to the node's other VMs.

Controllers place VMs by their caches. Two controllers at once, or one with an outdated cache, may
assign too much to a node. So the node checks again before it prepares the VM.
"""

from virtbus.nodeagent.core.ports import HostFacts
from virtbus.schemas.quantity import format_bytes
from virtbus.schemas.vm import VmRecord


def promised_bytes(record: VmRecord) -> int:
    """Return the guest memory that the VM takes from its host: none while it is off."""
    return record.spec.domain.memory.guest if record.powered else 0


def no_room(record: VmRecord, others_bytes: int, host: HostFacts) -> str:
    """Return why the host cannot take the VM, as in "has 1 GiB of memory left"; empty if it can.

    Only an impossible VM is refused: all VMs together would need more memory than the host has, or
    the VM has more vCPUs than a guest can have. Good placement is the controllers' task.
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
