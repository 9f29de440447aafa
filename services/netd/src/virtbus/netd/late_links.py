"""Remembers the links of removed networks on the host, until the kernel has deleted them."""

from collections.abc import Collection, Iterable

from virtbus.netd.core.attachment import Nic


class LateLinks:
    """Host links that may outlive their network, because a process holds the VM's namespace.

    The caller deletes the links that `due` returns.
    """

    def __init__(self) -> None:
        self._former: set[str] = set()
        self.waiting: set[str] = set()
        """The links that were remembered at the last call of `due`. The next call returns them."""

    def add(self, nics: Iterable[Nic]) -> None:
        """Remember the links of a network that was removed."""
        self._former.update(nic.host_link for nic in nics)

    def due(self, used: Collection[str]) -> set[str]:
        """Return the links that were remembered before the last call and that no VM uses now."""
        late, self.waiting = self.waiting.difference(used), self._former.difference(used)
        self._former = set()
        return late

    def known(self) -> set[str]:
        """Return all links that are remembered."""
        return self._former | self.waiting
