"""Plans the addresses of a VM's interfaces; refuses addresses that the VM's networks lack."""

import json
from collections.abc import Collection, Iterator, Mapping
from ipaddress import ip_address
from typing import NamedTuple

from virtbus.controller.core.network_demand import Targets
from virtbus.schemas.address_claim import ClaimedAddresses
from virtbus.schemas.address_pool import AddressPool
from virtbus.schemas.cni_config import capability
from virtbus.schemas.errors import Code, Detail, VirtbusError
from virtbus.schemas.ids import UNPLACED
from virtbus.schemas.network_object import BUILT_IN, ON_SEGMENTS, NetworkKind, NetworkTarget
from virtbus.schemas.vm import Interface, VmRecord, VmSpec
from virtbus.schemas.vm_status import VmStatus

_NICS = "spec.domain.devices.interfaces"
_SETTLED = frozenset({"Running", "Paused", "Stopped", "Succeeded"})
"""In these states, a status lists all interfaces that the VM has on its host."""


class Need(NamedTuple):
    """An interface whose addresses have to be claimed."""

    place: int
    """The index of the interface in the spec."""
    nic: Interface
    target: NetworkTarget

    @property
    def path(self) -> str:
        return f"{_NICS}[{self.place}]"

    @property
    def static(self) -> ClaimedAddresses:
        mac = self.nic.mac_address or ""
        return ClaimedAddresses(network=self.target.uid, addresses=self.nic.addresses, mac=mac)

    def open_pools(self) -> list[AddressPool]:
        """Return the pools of the IP versions for which the spec names no address."""
        given = {ip_address(text).version for text in self.nic.addresses}
        return [pool for pool in self.target.spec.pools() if pool.subnet.version not in given]


def needs(record: VmRecord, kept: Mapping[str, ClaimedAddresses]) -> list[Need]:
    """Return the interfaces whose addresses must be claimed, and that have no claims in `kept`.

    Raises:
        VirtbusError: 409 if a former interface of the same name is still being removed.
    """
    networks = {one.name: one.network for one in record.spec.networks}
    found = []
    for index, nic in enumerate(record.spec.domain.devices.interfaces):
        target = record.network_targets.get(networks.get(nic.name, ""))
        had = kept.get(nic.name)
        if had is not None and (target is None or had.network != target.uid):
            message = f"{nic.name!r} is still being removed from its former network; repeat later"
            detail = Detail(path=f"{_NICS}[{index}].name", message=message)
            raise VirtbusError(
                Code.CONFLICT, "detaching", message, details=(detail,), after_ms=1000
            )
        if had is None and target is not None and _claims(target, nic):
            found.append(Need(index, nic, target))
    return found


def _claims(target: NetworkTarget, nic: Interface) -> bool:
    """Return True if the interface needs a claim on the bus, of its addresses or of its MAC.

    On a segment of a LAN, a MAC in the spec is claimed even if the segment's DHCP server gives the
    IP address.
    """
    of_mac = target.spec.kind in ON_SEGMENTS and nic.mac_address is not None
    return target.spec.claimed or of_mac


def kept_claims(before: VmRecord | None) -> dict[str, ClaimedAddresses]:
    """Return the claims that an update keeps.

    A guest may still use the addresses of a removed interface, so its claims are kept. A VM without
    a node has no guest, so it keeps only the claims of the interfaces in its spec.
    """
    if before is None:
        return {}
    if before.node != UNPLACED:
        return dict(before.address_claims)
    names = {nic.name for nic in before.spec.domain.devices.interfaces}
    return {name: claims for name, claims in before.address_claims.items() if name in names}


def released(record: VmRecord, status: VmStatus | None) -> VmRecord:
    """Return the record without the claims of interfaces that the VM's guest no longer has.

    Only a status of the record's node and epoch counts, of its generation or a later generation. An
    earlier status may lack an interface that the guest received later.
    """
    wanted = {nic.name for nic in record.spec.domain.devices.interfaces}
    left = record.address_claims.keys() - wanted
    if not left or status is None or status.generation < record.generation:
        return record
    if (status.node, status.epoch) != (record.node, record.epoch):
        return record
    there = {one.name for one in status.interfaces}
    if str(status.state) not in _SETTLED or not (there >= wanted or not there):
        return record
    claims = {name: one for name, one in record.address_claims.items() if name not in left - there}
    if len(claims) == len(record.address_claims):
        return record
    return record.model_copy(update={"address_claims": claims})


# --- refusals -----------------------------------------------------------------------------
def refuse_static(spec: VmSpec, targets: Targets) -> None:
    """Refuse addresses that the network of their interface does not have.

    Raises:
        VirtbusError: 400 with each field. The addresses of `default` are checked by netd, because
            the subnet of `default` is a setting of the node.
    """
    found = tuple(_static_problems(spec, targets))
    if found:
        message = f"{found[0].path}: {found[0].message}; {found[0].hint}"
        raise VirtbusError(Code.INVALID, "invalid", message, details=found)


def _static_problems(spec: VmSpec, targets: Targets) -> Iterator[Detail]:
    networks = {one.name: one.network for one in spec.networks}
    seen: set[tuple[str, str]] = set()
    for index, nic in enumerate(spec.domain.devices.interfaces):
        network = networks.get(nic.name, "")
        target = targets.get(network)
        for at, text in enumerate(nic.addresses):
            path = f"{_NICS}[{index}].addresses[{at}]"
            if (network, text) in seen:
                hint = "give each interface its own"
                yield Detail(path=path, message=f"{text} is asked for twice", hint=hint)
            seen.add((network, text))
            if target is not None or network != BUILT_IN:
                yield from _outside(path, text, network, target)


def _outside(path: str, text: str, network: str, target: NetworkTarget | None) -> Iterator[Detail]:
    if target is None or target.spec.kind is NetworkKind.CNI:
        yield from _not_of_plugins(path, network, target.spec.config if target else None)
        return
    pools = every_pool(target)
    if any(pool.has(ip_address(text)) for pool in pools):
        return
    subnets = ", ".join(str(pool.subnet) for pool in pools) or "no subnet"
    hint = "choose a host of the subnet that is no gateway and not excluded"
    yield Detail(path=path, message=f"{network} does not have {text}, it has {subnets}", hint=hint)


def _not_of_plugins(path: str, network: str, config: str | None) -> Iterator[Detail]:
    """Yield a problem if the network's plugins take no addresses from a spec.

    `config` is None for a conflist of a node. Only the node knows such a conflist, so nothing is
    refused here.
    """
    if config is not None and not capability(json.loads(config), "ips"):
        hint = "leave addresses out, or make a network whose conflist has the capability ips"
        yield Detail(path=path, message=f"the plugins of {network} choose addresses", hint=hint)


def every_pool(target: NetworkTarget) -> list[AddressPool]:
    """Return the pools of a network on all nodes."""
    spec = target.spec
    nodes = sorted({*spec.subnets, *spec.subnets6}) or [""]
    return [pool for node in nodes for pool in spec.pools(node)]


def refuse_hosts(need: Need, hosts: Mapping[str, str]) -> None:
    """Raise 409 for a static address that a host has; `hosts` are names of nodes by address."""
    for at, text in enumerate(need.nic.addresses):
        if text in hosts:
            message = f"the node {hosts[text]} has {text}; choose another"
            path = f"{need.path}.addresses[{at}]"
            detail = Detail(path=path, message=message)
            raise VirtbusError(
                Code.CONFLICT, "address_taken", f"{path}: {message}", details=(detail,)
            )


def exhausted(need: Need, pool: AddressPool, withheld: Collection[str]) -> VirtbusError:
    """Return 429 for a pool that has no free address."""
    target = need.target
    hosts = f", {len(withheld)} of them by VMs that only their hosts know" if withheld else ""
    message = (
        f"all {pool.size} addresses of {pool.subnet} in the network {target.name} are taken"
        f"{hosts}; delete VMs that use it, or choose another network"
    )
    detail = Detail(path=f"{need.path}.name", message=message)
    return VirtbusError(
        Code.EXHAUSTED, "pool_exhausted", message, details=(detail,), after_ms=5_000
    )
