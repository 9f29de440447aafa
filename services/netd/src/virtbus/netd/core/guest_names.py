"""The VMs of this host by name and by address."""

from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address

from virtbus.schemas.ip_types import Address


@dataclass(frozen=True, slots=True)
class NamedVm:
    """A VM of this host, with its addresses on each kind of network."""

    uid: str
    namespace: str
    name: str
    built_in: tuple[IPv4Address, ...]
    others: tuple[Address, ...]
    built_in6: tuple[IPv6Address, ...] = ()
    networks: tuple[tuple[str, Address], ...] = ()
    """Pairs of a network object's uid and an address that the VM has on this network's bridge."""
    gateways: tuple[tuple[IPv4Address, IPv4Address], ...] = ()
    """Each address from which the VM queries names, with the gateway that it queries."""
    servers: tuple[tuple[IPv4Address, tuple[Address, ...]], ...] = ()
    """Each address from which the VM queries names, with the name servers in its network object.

    These servers are queried for names that no VM has.
    """
    sharing: tuple[str, ...] = ()
    """The uids of the VM's networks on which guests know the VMs of all namespaces by name."""

    @property
    def addresses(self) -> tuple[Address, ...]:
        """The addresses that guests of this host reach most directly."""
        built_in: tuple[Address, ...] = (*self.built_in, *self.built_in6)
        return built_in or self.others or tuple(address for _, address in self.networks)

    @property
    def asking(self) -> tuple[IPv4Address, ...]:
        networks = (one for _, one in self.networks if isinstance(one, IPv4Address))
        return (*self.built_in, *networks)

    def is_known_to(self, asking: "NamedVm") -> bool:
        return self.namespace == asking.namespace or not {*self.sharing}.isdisjoint(asking.sharing)

    def servers_for(self, address: IPv4Address) -> tuple[Address, ...]:
        """Return the servers for the VM's queries from an address; empty for the host's servers."""
        return dict(self.servers).get(address, ())

    def addresses_for(self, asking: "NamedVm") -> tuple[Address, ...]:
        """Return the addresses that `asking`, a VM of this host, reaches most directly."""
        shared = {network for network, _ in asking.networks}
        found = tuple(address for network, address in self.networks if network in shared)
        if not found:
            return self.addresses
        own: tuple[Address, ...] = (*self.built_in, *self.built_in6) if asking.built_in else ()
        return (*found, *own)


class GuestNames:
    """The VMs of this host. If two VMs have one name, the name belongs to the younger VM."""

    def __init__(self) -> None:
        self._by_uid: dict[str, NamedVm] = {}
        self._by_name: dict[tuple[str, str], set[str]] = {}
        self._by_address: dict[object, str] = {}

    @property
    def uids(self) -> frozenset[str]:
        return frozenset(self._by_uid)

    def put(self, vm: NamedVm) -> None:
        self.remove(vm.uid)
        self._by_uid[vm.uid] = vm
        self._by_name.setdefault((vm.namespace, vm.name), set()).add(vm.uid)
        self._by_address.update(dict.fromkeys((*vm.asking, *vm.built_in6), vm.uid))

    def remove(self, uid: str) -> tuple[IPv4Address, ...]:
        vm = self._by_uid.pop(uid, None)
        if vm is None:
            return ()
        name = (vm.namespace, vm.name)
        self._by_name[name].discard(uid)
        if not self._by_name[name]:
            del self._by_name[name]
        for address in (*vm.asking, *vm.built_in6):
            if self._by_address.get(address) == uid:
                del self._by_address[address]
        return vm.asking

    def named(self, namespace: str, name: str) -> NamedVm | None:
        """Return the youngest VM of a name. Uids are UUIDs of version 7, which grow with time."""
        uids = self._by_name.get((namespace, name))
        return self._by_uid[max(uids)] if uids else None

    def at(self, address: object) -> NamedVm | None:
        """Return the VM that queries from an IPv4 address, or has an IPv6 address on `default`."""
        uid = self._by_address.get(address)
        return self._by_uid[uid] if uid is not None else None
