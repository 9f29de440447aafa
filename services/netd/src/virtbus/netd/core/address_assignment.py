"""Assignment of addresses and MACs to the planned interfaces of a VM."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from ipaddress import IPv4Interface, IPv6Interface, ip_address, ip_interface
from types import MappingProxyType

from virtbus.netd.core.attachment import Attachment, Nic, NicKind
from virtbus.netd.core.dhcp import DhcpLease
from virtbus.netd.core.reach import ReachRules, is_host
from virtbus.netd.core.subnet import choose_address
from virtbus.netd.core.used_nics import UsedNics
from virtbus.schemas.address_pool import Address, AddressPool, pool_of
from virtbus.schemas.errors import Code, Detail, Retry, VirtbusError
from virtbus.schemas.network_object import BRIDGE_MTU

Gateway = IPv4Interface | IPv6Interface
NOTHING_FREED: Mapping[str, int] = MappingProxyType({})


def check_macs(attachment: Attachment, used: UsedNics) -> None:
    """Refuse a MAC that another VM on this node has (NET-04).

    Raises:
        VirtbusError: 409 `mac_in_use`.
    """
    for nic in attachment.nics:
        if used.has_mac(nic.mac, but=attachment.uid):
            message = (
                f"another VM on this node has the MAC {nic.mac}; give interface '{nic.name}' "
                "another mac_address, or none"
            )
            detail = Detail(path=f"{nic.path}.mac_address", message=message)
            raise VirtbusError(Code.CONFLICT, "mac_in_use", message, details=(detail,))


def carried_over(
    plan: Attachment, known: Attachment | None, insistent: Collection[str]
) -> Attachment:
    """Return the plan with the addresses or the MACs that the same interfaces have in `known`.

    An interface on a network other than CNI keeps its addresses. An interface on a network in
    `insistent` keeps its MAC, because the plugins of such a CNI network choose the MAC.
    """
    nics = known.nics if known is not None else ()
    former = {(nic.name, nic.network, nic.place): nic for nic in nics}

    def carry(nic: Nic) -> Nic:
        old = former.get((nic.name, nic.network, nic.place))
        if old is None:
            return nic
        if nic.kind is not NicKind.CNI:
            return nic.model_copy(update={"addresses": old.addresses})
        return nic.model_copy(update={"mac": old.mac}) if nic.network in insistent else nic

    return plan.model_copy(update={"nics": tuple(carry(nic) for nic in plan.nics)})


def addressed(
    nic: Nic,
    uid: str,
    gateways: Sequence[Gateway],
    taken: Collection[str],
    most: int = BRIDGE_MTU,
    freed: Mapping[str, int] = NOTHING_FREED,
) -> Nic:
    """Return an interface with an address of each gateway's subnet, and the network's settings.

    The first gateway is IPv4's. `taken` are the addresses of the network that other interfaces on
    this host have. `freed` maps released addresses of the network to the order of their releases.
    `most` is the MTU if the network object sets none.

    Raises:
        VirtbusError: 409 `address_in_use`: the record's address is taken. 422 `address_outside`:
            the record's address is not in a subnet of this node. 422 `mtu_too_large`: the record's
            MTU exceeds the network's. 429 `addresses_exhausted`: no address is left.
    """
    spec = nic.target.spec if nic.target is not None else None
    return nic.model_copy(
        update={
            "addresses": _chosen(nic, uid, [_pool(nic, one) for one in gateways], taken, freed),
            "gateway": "" if nic.kind is NicKind.ISOLATED else str(gateways[0].ip),
            "gateway6": "" if nic.kind is NicKind.ISOLATED else "".join(_ips(gateways[1:])),
            "mtu": mtu_within(nic, (spec.mtu if spec is not None else None) or most),
            "dns": spec.dns if spec is not None else (),
        }
    )


def _chosen(
    nic: Nic,
    uid: str,
    pools: Sequence[AddressPool],
    taken: Collection[str],
    freed: Mapping[str, int] = NOTHING_FREED,
) -> tuple[str, ...]:
    _check_asked(nic, pools, taken)
    return tuple(one for pool in pools for one in _given(nic, uid, pool, taken, freed))


def _ips(gateways: Sequence[Gateway]) -> list[str]:
    return [str(gateway.ip) for gateway in gateways]


def _pool(nic: Nic, gateway: Gateway) -> AddressPool:
    spec = nic.target.spec if nic.target is not None else None
    if spec is None:
        return pool_of(gateway.network, gateway.ip)
    return pool_of(gateway.network, gateway.ip, spec.ranges, spec.excluded)


def _given(
    nic: Nic, uid: str, pool: AddressPool, taken: Collection[str], freed: Mapping[str, int]
) -> Iterator[str]:
    asked = [text for text in nic.asked if ip_address(text).version == pool.subnet.version]
    if not asked:
        kept = _kept(nic, pool, taken)
        asked = [kept or str(choose_address(pool, nic, uid, taken, freed))]
    for text in asked:
        yield f"{text}/{pool.subnet.prefixlen}"


def _check_asked(nic: Nic, pools: Sequence[AddressPool], taken: Collection[str]) -> None:
    for text in nic.asked:
        path = f"{nic.path}.addresses"
        if not any(pool.has(ip_address(text)) for pool in pools):
            subnets = " and ".join(str(pool.subnet) for pool in pools)
            message = f"'{nic.network}' has {subnets} on this node, without {text}; choose another"
            detail = Detail(path=path, message=message)
            raise VirtbusError(Code.UNSUPPORTED, "address_outside", message, details=(detail,))
        if text in taken:
            message = (
                f"another VM on this node, or a host, has {text}; give '{nic.name}' another address"
            )
            detail = Detail(path=path, message=message)
            raise VirtbusError(Code.CONFLICT, "address_in_use", message, details=(detail,))


def on_segment(
    nic: Nic, uid: str, link_mtu: int, taken: Collection[str], hosts: Collection[Address]
) -> Nic:
    """Return an interface on a segment, with the addresses that were claimed for it.

    Without a subnet, the interface has no address until its guest has a DHCP lease. `taken` is as
    in `addressed`. `hosts` are the addresses of hosts, which no guest may have.

    Raises:
        VirtbusError: the errors of `addressed`. 422 `mtu_too_large`: the network's or the record's
            MTU exceeds the link's.
    """
    mtu = network_mtu(nic, link_mtu)
    if nic.on_segment or nic.target is None:
        return nic.model_copy(update={"addresses": (), "gateway": "", "mtu": mtu})
    spec = nic.target.spec
    others = {*taken, *map(str, hosts)}
    return nic.model_copy(
        update={
            "addresses": _chosen(nic, uid, spec.pools(), others),
            "gateway": spec.gateway or "",
            "gateway6": spec.gateway6 or "",
            "mtu": mtu,
            "dns": spec.dns,
        }
    )


def network_mtu(nic: Nic, link_mtu: int) -> int:
    """Return the MTU of an interface on a link that virtbus did not make.

    Raises:
        VirtbusError: 422 `mtu_too_large` if the network's or the record's MTU exceeds the link's.
    """
    asked = (nic.target.spec.mtu if nic.target is not None else None) or link_mtu
    if asked > link_mtu:
        message = (
            f"the network '{nic.network}' has an MTU of {asked}, and its link on this node has "
            f"{link_mtu}; lower the network's"
        )
        raise mtu_too_large(nic, message)
    return mtu_within(nic, asked)


def mtu_too_large(nic: Nic, message: str) -> VirtbusError:
    """Return 422 `mtu_too_large` for the network of an interface."""
    detail = Detail(path=nic.network_path, message=message)
    return VirtbusError(Code.UNSUPPORTED, "mtu_too_large", message, details=(detail,))


def leased(vm: Attachment, index: int, lease: DhcpLease, reach: ReachRules) -> Attachment:
    """Return the attachment with a DHCP lease's address, if interface `index` is on a segment.

    The agent connects to the addresses of guests on behalf of its clients. The address of a host
    would lead the clients to this host.

    Raises:
        VirtbusError: 403 `lease_refused` for an address that a host has, or that no host can have.
    """
    nic = next((one for one in vm.nics if one.index == index and one.on_segment), None)
    if nic is None:
        return vm
    address = lease.address.ip
    if address in reach.hosts or not is_host(address):
        message = (
            f"a DHCP server of the network '{nic.network}' gave the guest {address}, which is the "
            "address of a host of the fleet, or no address for a host; correct the server's range"
        )
        raise VirtbusError(Code.DENIED, "lease_refused", message)
    gateway = str(lease.router) if lease.router is not None else ""
    update = {"addresses": (str(lease.address),), "gateway": gateway}
    return replaced(vm, nic.model_copy(update=update))


def _kept(nic: Nic, pool: AddressPool, used: Collection[str]) -> str | None:
    for text in nic.addresses:
        address = ip_interface(text)
        if address.network == pool.subnet and pool.has(address.ip) and str(address.ip) not in used:
            return str(address.ip)
    return None


def mtu_within(nic: Nic, most: int) -> int:
    """Return the MTU of an interface on a network whose MTU is `most`.

    Raises:
        VirtbusError: 422 `mtu_too_large` if the record's MTU is larger.
    """
    if nic.asked_mtu > most:
        path = f"{nic.path}.mtu"
        message = (
            f"interface '{nic.name}' asks for an MTU of {nic.asked_mtu}, and the network "
            f"'{nic.network}' has {most}; lower the interface's, or leave it out"
        )
        detail = Detail(path=path, message=f"must be at most {most}")
        raise VirtbusError(Code.UNSUPPORTED, "mtu_too_large", message, details=(detail,))
    return nic.asked_mtu or most


def replaced(attachment: Attachment, nic: Nic) -> Attachment:
    """Return the attachment with `nic` in place of the interface with the same index."""
    nics = tuple(nic if each.index == nic.index else each for each in attachment.nics)
    return attachment.model_copy(update={"nics": nics})


def refused_mac(nic: Nic, mac: str) -> VirtbusError:
    """Return 409 `cni_mac`: the plugins chose another MAC than netd planned for the guest."""
    path = f"{nic.path}.mac_address"
    return VirtbusError(
        Code.CONFLICT,
        "cni_mac",
        f"the plugins of '{nic.network}' chose the MAC {mac} instead of {nic.mac}; the next try "
        "attaches this network before the start and takes their MAC",
        retry=Retry.LATER,
        after_ms=0,
        details=(Detail(path=path, message=f"the plugins chose {mac}"),),
    )


def no_link(nic: Nic) -> VirtbusError:
    """Return 422 `cni_link`: the plugins made no link in the namespace."""
    message = (
        f"the plugins of '{nic.network}' made no {nic.eth}; use ones that make a veth, such as "
        "bridge or ptp"
    )
    return VirtbusError(Code.UNSUPPORTED, "cni_link", message)


def refusal(error: VirtbusError | OSError) -> VirtbusError:
    """Return a VirtbusError as it is, and an error of the kernel as 500 `network_failed`."""
    if isinstance(error, VirtbusError):
        return error
    return VirtbusError(
        Code.INTERNAL,
        "network_failed",
        f"the kernel refused a step of the network: {error}; see netd's log, then try again",
    )
