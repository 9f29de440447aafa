"""Lets kept records share equal hardware: VMs are mostly of a few kinds."""

from weakref import WeakValueDictionary

from virtbus.schemas.vm import Domain, VmRecord

_Kind = tuple[int, int, int]
"""Memory in bytes, cores, and the number of disks."""


class EqualDomains:
    """The last domain of each kind, while a kept record has it.

    A domain is 8 models of 600 bytes each, which is nearly half of a record.
    """

    def __init__(self) -> None:
        self._domains: WeakValueDictionary[_Kind, Domain] = WeakValueDictionary()

    def shared(self, record: VmRecord) -> VmRecord:
        """Return the record; its domain becomes that of an earlier record, if they are equal."""
        domain = record.spec.domain
        kind = (domain.memory.guest, domain.cpu.cores, len(domain.devices.disks))
        earlier = self._domains.get(kind)
        if earlier is domain:
            return record
        if earlier != domain:
            self._domains[kind] = domain
            return record
        record.spec.__dict__["domain"] = earlier  # frozen, but nobody can tell equal values apart
        return record
