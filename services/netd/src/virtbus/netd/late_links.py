"""Remembers host links of removed networks until the kernel has deleted the links."""

from collections.abc import Collection, Iterable

from virtbus.netd.core.attachment import Nic


class LateLinks:
    """Host links that may outlive their network, because a process holds the VM's namespace.

    The caller deletes the links that `due` returns.
    """

    def __init__(self) -> None:
        self._former: set[str] = set()
        self.waiting: set[str] = set()
        """The links for the next call of `due`, which drops links in use."""

    def add(self, nics: Iterable[Nic]) -> None:
        self._former.update(nic.host_link for nic in nics)

    def due(self, used: Collection[str]) -> set[str]:
        """Return the unused links that were added before the previous call."""
        late, self.waiting = self.waiting.difference(used), self._former.difference(used)
        self._former = set()
        return late

    def known(self) -> set[str]:
        return self._former | self.waiting
