"""Remembers host links of networks that are gone: the kernel frees namespaces a little later."""

from collections.abc import Collection, Iterable

from virtbus.netd.core.attachment import Nic


class LateLinks:
    """Host links that may outlive their VM. A link that exists at the second look is in use."""

    def __init__(self) -> None:
        self._former: set[str] = set()
        self.waiting: set[str] = set()
        """The links that have seen one look. The next look returns them."""

    def add(self, nics: Iterable[Nic]) -> None:
        """Remember the links of a network that was removed."""
        self._former.update(nic.host_link for nic in nics)

    def due(self, used: Collection[str]) -> set[str]:
        """Return the links that have seen one look already, and that no VM uses now."""
        late, self.waiting = self.waiting.difference(used), self._former.difference(used)
        self._former = set()
        return late

    def known(self) -> set[str]:
        """Return all links that are remembered."""
        return self._former | self.waiting
