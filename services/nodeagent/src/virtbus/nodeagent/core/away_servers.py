"""Keeps which servers of pools do not answer, and says which guests wait for them."""

from collections.abc import Callable

from virtbus.schemas.vm import VmRecord

STALLS = (
    "the server of the pool {pool} does not answer, so a disk of the guest stalls; start it, and "
    "the guest continues by itself"
)


class AwayServers:
    """The pools whose server does not answer. QEMU itself reports it only with some protocols."""

    def __init__(self) -> None:
        self._pools: set[str] = set()
        self.changed: Callable[[], None] = lambda: None
        """Called when a server went away, or is back."""

    def set(self, pool: str, *, away: bool) -> None:
        """Note if the server of a pool is away."""
        if away != (pool in self._pools):
            (self._pools.add if away else self._pools.discard)(pool)
            self.changed()

    def why_it_stalls(self, record: VmRecord) -> str:
        """Return why a VM's guest may wait for a disk; empty if each of its servers answers."""
        waits = self._pools & {ref.pool for ref in record.volume_refs.values()}
        return STALLS.format(pool=min(waits)) if waits else ""
