"""Checks that a VM that is new to this node fits next to its other VMs.

Controllers place by their cache. Two of them, or one that lags, may assign too much. The node is
the last check before anything of the VM begins.
"""

from collections.abc import Iterable

from virtbus.nodeagent.core.ports import HostFacts
from virtbus.schemas.quantity import format_bytes
from virtbus.schemas.vm import VmRecord


def no_room(record: VmRecord, others: Iterable[VmRecord], host: HostFacts) -> str:
    """Return why the host cannot take it, as in "n1 has …"; empty if it can.

    Only impossible VMs are refused: more guest memory than the host has in total, or more vCPUs
    than one guest can have. Good placement is the controllers' task.
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
