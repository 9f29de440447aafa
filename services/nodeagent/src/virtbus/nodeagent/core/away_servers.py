"""Keeps the pools whose server does not answer, and explains stalled disks of guests."""

from collections.abc import Callable

from virtbus.schemas.vm import VmRecord

STALLS = (
    "the server of the pool {pool} does not answer, so a disk of the guest stalls; start it, and "
    "the guest continues by itself"
)


class AwayServers:
    """The pools whose server does not answer.

    QEMU reports an absent server only for some protocols.
    """

    def __init__(self) -> None:
        self._pools: set[str] = set()
        self.changed: Callable[[], None] = lambda: None
        """Called when a server stops or resumes its answers."""

    def set(self, pool: str, *, away: bool) -> None:
        if away != (pool in self._pools):
            (self._pools.add if away else self._pools.discard)(pool)
            self.changed()

    def why_it_stalls(self, record: VmRecord) -> str:
        """Return the reason for which a VM's disk may stall; empty if all its servers answer."""
        waits = self._pools & {ref.pool for ref in record.volume_refs.values()}
        return STALLS.format(pool=min(waits)) if waits else ""
