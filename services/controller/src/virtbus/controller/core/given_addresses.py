"""Caches the claimed and the released addresses of each network."""

from collections.abc import Collection, Mapping
from types import MappingProxyType

from virtbus.schemas.subjects import ADDRESS_KEYS, claimed_address

FREED_KEPT = 20_000
"""Number of released addresses that are kept for a network. An address whose release is older
counts as never used."""
_NONE: Mapping[str, int] = MappingProxyType({})


class GivenAddresses:
    """The addresses by network, from the claims that a watch delivers.

    The cache may lag. So it only proposes an address, and the claim on the bus decides.
    """

    def __init__(self) -> None:
        self._taken: dict[str, set[str]] = {}
        self._freed: dict[str, dict[str, int]] = {}
        """By network: the released addresses in order of release, with the purge's revision."""

    # --- input ----------------------------------------------------------------------------
    def put(self, key: str) -> None:
        """Process a claim of an address; ignore a claim of a name."""
        if not key.startswith(ADDRESS_KEYS):
            return
        network, address = claimed_address(key)
        self._freed.get(network, {}).pop(address, None)
        self._taken.setdefault(network, set()).add(address)

    def purge(self, key: str, revision: int) -> None:
        """Process the purge marker of an address claim; ignore the purge marker of a name claim."""
        if not key.startswith(ADDRESS_KEYS):
            return
        self.forget(key)
        network, address = claimed_address(key)
        freed = self._freed.setdefault(network, {})
        freed.pop(address, None)
        freed[address] = revision
        if len(freed) > FREED_KEPT:
            del freed[next(iter(freed))]

    def forget(self, key: str) -> None:
        """Drop a claim that was purged, or that a complete list does not contain."""
        network, address = claimed_address(key)
        taken = self._taken.get(network, set())
        taken.discard(address)
        if not taken:
            self._taken.pop(network, None)

    # --- answers --------------------------------------------------------------------------
    def taken(self, network: str) -> Collection[str]:
        return self._taken.get(network, frozenset())

    def freed(self, network: str) -> Mapping[str, int]:
        """Return the released addresses in order of release, with the revisions of the purges."""
        return self._freed.get(network, _NONE)

    def count(self, namespace: str | None = None) -> int:
        """Return the number of address claims of a network, or of all networks.

        In the key of an address claim, the uid of the network has the place of the namespace.
        """
        if namespace is None:
            return sum(map(len, self._taken.values()))
        return len(self.taken(namespace))
