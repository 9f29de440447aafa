"""Lets records with equal `spec.domain`s share one object, which saves memory."""

from weakref import WeakValueDictionary

from virtbus.schemas.vm import Domain, VmRecord

_Kind = tuple[int, int, int]
"""Memory in bytes, cores, and the number of disks."""


class EqualDomains:
    """The last `spec.domain` of each kind, as long as a record in memory has that object.

    Most VMs are of a few kinds. A `spec.domain` is 8 models of 600 bytes each, which is nearly half
    of a record.
    """

    def __init__(self) -> None:
        self._domains: WeakValueDictionary[_Kind, Domain] = WeakValueDictionary()

    def shared(self, record: VmRecord) -> VmRecord:
        """Return the record, with the last `spec.domain` of its kind if both are equal."""
        domain = record.spec.domain
        kind = (domain.memory.guest, domain.cpu.cores, len(domain.devices.disks))
        earlier = self._domains.get(kind)
        if earlier is domain:
            return record
        if earlier != domain:
            self._domains[kind] = domain
            return record
        record.spec.__dict__["domain"] = earlier  # frozen, but equal to the former value
        return record
