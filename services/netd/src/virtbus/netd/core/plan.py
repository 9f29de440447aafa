"""The attachment for a record, before any address is known."""

from virtbus.netd.core import names
from virtbus.netd.core.attachment import Attachment, Nic, NicKind
from virtbus.netd.core.passt import KINDS as WITH_PASST
from virtbus.netd.core.pod_args import pod_args
from virtbus.schemas.cni_config import plugins_differ
from virtbus.schemas.errors import Code, Detail, VirtbusError
from virtbus.schemas.guest_network import GUEST_NETWORK, GUEST_NETWORK6
from virtbus.schemas.network import LinkState, guest_mac
from virtbus.schemas.network_object import BUILT_IN, NetworkTarget
from virtbus.schemas.nic import NicBinding
from virtbus.schemas.vm import Interface, VmRecord
from virtbus.schemas.wire import invalid

_PATH = "spec.domain.devices.interfaces"
_PUBLISHING = frozenset({NicKind.BRIDGE, NicKind.NAT, NicKind.ROUTED, NicKind.OVERLAY, NicKind.CNI})
"""Kinds to whose guests a port of the host may lead."""
_BINDINGS = frozenset({NicBinding.MASQUERADE, NicBinding.PASST})
"""Bindings that netd makes. Other bindings only demand a kind of network."""
_TRANSLATING = _PUBLISHING
"""Kinds that give the VM's namespace an address and a gateway. Masquerade needs both."""


def plan_of(record: VmRecord) -> Attachment:
    """Return the attachment for a record, with MACs but without addresses.

    Raises:
        VirtbusError: 400 if an interface names no network, a MAC appears twice, or an interface has
            properties that its network does not permit; 409 `address_unclaimed`.
    """
    networks = {network.name: network for network in record.spec.networks}
    nics: list[Nic] = []
    for index, interface in enumerate(record.spec.domain.devices.interfaces):
        named = networks.get(interface.name)
        if named is None:
            message = f"no entry of spec.networks is named '{interface.name}'; add one"
            raise invalid((Detail(path=f"{_PATH}[{index}].name", message=message),))
        network = named.network
        target = record.network_targets.get(network)
        kind = _kind(network, target)
        _refuse_other_kind(index, interface, network, kind)
        if named.plugins_digest is not None and kind is not NicKind.CNI:
            raise plugins_differ(index, network, f"it is a {kind} network")
        if interface.publish and kind not in _PUBLISHING:
            message = (
                f"'{network}' is a {kind} network, to whose guests no host forwards; publish on an "
                f"interface of '{BUILT_IN}', of a nat, routed or overlay network, or of a conflist "
                "with the plugin portmap"
            )
            raise invalid((Detail(path=f"{_PATH}[{index}].publish", message=message),))
        mac = interface.mac_address or guest_mac(record.uid, interface.name)
        if mac in [nic.mac for nic in nics]:
            message = f"{mac} appears twice in this VM; give each interface its own"
            raise invalid((Detail(path=f"{_PATH}[{index}].mac_address", message=message),))
        nics.append(
            Nic(
                index=index,
                position=index,
                name=interface.name,
                network=network,
                kind=kind,
                target=target,
                mac=mac,
                asked=_asked(record, interface, target),
                host_link=names.host_link(record.uid, index),
                asked_mtu=interface.mtu or 0,
                queues=interface.queues or 1,
                state=interface.state or LinkState.UP,
                limits=interface.limits,
                publish=interface.publish,
                binding=interface.binding if interface.binding in _BINDINGS else None,
                plugins_digest=named.plugins_digest or "",
                plugin_args=pod_args(record) if kind is NicKind.CNI else {},
                ports=interface.ports,
                guest_network=interface.vm_network_cidr or GUEST_NETWORK,
                guest_network6=interface.vm_ipv6_network_cidr or GUEST_NETWORK6,
            )
        )
    return Attachment(
        uid=record.uid,
        epoch=record.epoch,
        generation=record.generation,
        namespace=record.namespace,
        vm_name=record.name,
        firmware_uuid=record.spec.domain.firmware.uuid,
        labels=record.labels,
        owner=record.owner,
        dns_config=record.spec.dns_config,
        nics=tuple(nics),
    )


def _refuse_other_kind(index: int, interface: Interface, network: str, kind: NicKind) -> None:
    if interface.binding is NicBinding.MACVTAP and kind is not NicKind.MACVTAP:
        message = f"'{network}' is no network of the kind macvtap; write bridge, or use another one"
    elif interface.binding is NicBinding.MASQUERADE and kind not in _TRANSLATING:
        message = (
            f"'{network}' is of the kind {kind}, on which no address or no gateway is known for "
            "the VM's namespace; write bridge, or use another network"
        )
    elif interface.binding is NicBinding.PASST and kind not in WITH_PASST:
        message = (
            f"'{network}' is a {kind} network, which gives the address itself; passt serves "
            f"'{BUILT_IN}', and nat, routed, isolated and overlay networks"
        )
    else:
        return
    raise invalid((Detail(path=f"{_PATH}[{index}].binding", message=message),))


def _asked(record: VmRecord, interface: Interface, target: NetworkTarget | None) -> tuple[str, ...]:
    """Return the addresses that the record gives an interface.

    Raises:
        VirtbusError: 409 `address_unclaimed` if the addresses are not claimed on the bus.
    """
    if target is None or not target.spec.claimed:
        return interface.addresses
    claims = record.address_claims.get(interface.name)
    if claims is None or claims.network != target.uid:
        message = (
            f"interface '{interface.name}' has no claimed address on '{target.name}'; unplug it, "
            "and plug it again"
        )
        raise VirtbusError(Code.CONFLICT, "address_unclaimed", message)
    return claims.addresses


def _kind(network: str, target: NetworkTarget | None) -> NicKind:
    """Return the kind of a network. A network without an object is `default` or a conflist."""
    if target is not None:
        return NicKind.of(target.spec.kind)
    return NicKind.BRIDGE if network == BUILT_IN else NicKind.CNI
