"""Checks that a VM that is new to this node fits next to its other VMs.

Controllers place VMs by their cache. Two controllers, or one with an old cache, may assign too
much. So the node checks again before it makes anything of the VM.
"""

from collections.abc import Iterable

from virtbus.nodeagent.core.ports import HostFacts
from virtbus.schemas.quantity import format_bytes
from virtbus.schemas.vm import VmRecord


def no_room(record: VmRecord, others: Iterable[VmRecord], host: HostFacts) -> str:
    """Return why the host cannot take the VM, as in "has 1 GiB of memory left"; empty if it can.

    It refuses only impossible VMs: all VMs together need more memory than the host has, or the VM
    has more vCPUs than a guest can have. Good placement is the controllers' task.
    """
    if not record.powered:
        return ""
    wanted = record.spec.domain.cpu.vcpus
    if host.max_vcpus and wanted > host.max_vcpus:
        return f"runs at most {host.max_vcpus} vCPUs in a VM, {wanted} asked"
    promised = sum(one.spec.domain.memory.guest for one in others if one.powered)
    free = max(host.memory_bytes - promised, 0)
    guest = record.spec.domain.memory.guest
    if guest > free:
        return f"has {format_bytes(free)} of memory left, {format_bytes(guest)} asked"
    return ""
