"""Keeps the pools whose server does not answer, and says why a guest may wait for a disk."""

from collections.abc import Callable

from virtbus.schemas.vm import VmRecord

STALLS = (
    "the server of the pool {pool} does not answer, so a disk of the guest stalls; start it, and "
    "the guest continues by itself"
)


class AwayServers:
    """The pools whose server does not answer. For some protocols, QEMU itself reports nothing."""

    def __init__(self) -> None:
        self._pools: set[str] = set()
        self.changed: Callable[[], None] = lambda: None
        """Called when a server no longer answers, or answers again."""

    def set(self, pool: str, *, away: bool) -> None:
        """Note whether the server of a pool is away."""
        if away != (pool in self._pools):
            (self._pools.add if away else self._pools.discard)(pool)
            self.changed()

    def why_it_stalls(self, record: VmRecord) -> str:
        """Return why a VM's guest may wait for a disk; empty if all servers of its disks answer."""
        waits = self._pools & {ref.pool for ref in record.volume_refs.values()}
        return STALLS.format(pool=min(waits)) if waits else ""
