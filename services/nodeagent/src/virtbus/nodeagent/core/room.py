"""Whether a VM that is new to this node fits beside what the node holds.

Controllers place by what they know; two of them, or one that lags, may send too much. The node is
the last to say so, before anything of the VM begins.
"""

from collections.abc import Iterable

from virtbus.nodeagent.core.ports import HostFacts
from virtbus.schemas.quantity import format_bytes
from virtbus.schemas.vm import VmRecord


def no_room(record: VmRecord, held: Iterable[VmRecord], host: HostFacts) -> str:
    """Why the host cannot take it, as in "n1 has …"; empty where it can.

    Only what can never go well is refused: more memory for guests than the host has at all, more
    vCPUs than one guest can have. What is wise is the controllers' business.
    """
    if not record.powered:
        return ""
    wanted = record.spec.domain.cpu.vcpus
    if host.max_vcpus and wanted > host.max_vcpus:
        return f"runs at most {host.max_vcpus} vCPUs in a VM, {wanted} asked"
    promised = sum(one.spec.domain.memory.guest for one in held if one.powered)
    free = max(host.memory_bytes - promised, 0)
    guest = record.spec.domain.memory.guest
    if guest > free:
        return f"has {format_bytes(free)} of memory left, {format_bytes(guest)} asked"
    return ""
