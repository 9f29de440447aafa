"""What is promised on each node, kept up as records come and go.

A create looks at every node; it must not look at every VM as well (10,000 of them cost 10 ms).
"""

from dataclasses import dataclass, field

from virtbus.controller.core.placement import memory_of
from virtbus.schemas.vm import VmRecord


def takes_room(record: VmRecord) -> bool:
    """A stopped VM promises nothing but its disks; its start asks for room anew (ADR 0012)."""
    return record.powered


@dataclass(slots=True)
class Load:
    """The sum over a node's VMs; memory with QEMU's overhead."""

    vms: int = 0
    vcpus: int = 0
    memory_bytes: int = 0


NOTHING = Load()


@dataclass(slots=True)
class Promises:
    """Loads by node; a node without VMs has no entry."""

    on: dict[str, Load] = field(default_factory=dict)

    def add(self, record: VmRecord) -> None:
        """A record is on its node now."""
        load = self.on.setdefault(record.node, Load())
        load.vms += 1
        if takes_room(record):
            load.vcpus += record.spec.domain.cpu.vcpus
            load.memory_bytes += memory_of(record.spec)

    def take_back(self, record: VmRecord) -> None:
        """The same record, which was added, is no more or changes."""
        load = self.on[record.node]
        load.vms -= 1
        if takes_room(record):
            load.vcpus -= record.spec.domain.cpu.vcpus
            load.memory_bytes -= memory_of(record.spec)
        if not load.vms:
            del self.on[record.node]
