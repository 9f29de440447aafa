"""A VM's names and addresses, from its attachment."""

from ipaddress import IPv4Address, IPv6Address, ip_address, ip_interface

from virtbus.netd.core.attachment import WITH_NAMES, Attachment, Nic, NicKind
from virtbus.netd.core.guest_names import NamedVm
from virtbus.netd.core.reach import is_host
from virtbus.schemas.ip_types import Address


def vm_of(attachment: Attachment) -> NamedVm:
    """Return the names and addresses of an attachment."""

    def addresses(kind: NicKind) -> list[Address]:
        nics = (nic for nic in attachment.nics if nic.kind is kind)
        return [ip_interface(text).ip for nic in nics for text in nic.addresses]

    built_in = addresses(NicKind.BRIDGE)

    return NamedVm(
        uid=attachment.uid,
        namespace=attachment.namespace,
        name=attachment.vm_name,
        built_in=tuple(one for one in built_in if isinstance(one, IPv4Address)),
        others=tuple(addresses(NicKind.CNI)),
        built_in6=tuple(one for one in built_in if isinstance(one, IPv6Address)),
        networks=tuple(
            (nic.place, ip_interface(text).ip)
            for nic in attachment.nics
            if nic.kind in WITH_NAMES and nic.kind is not NicKind.BRIDGE
            for text in nic.addresses
        ),
        gateways=tuple(
            (address, IPv4Address(nic.gateway))
            for nic in attachment.nics
            if nic.kind in WITH_NAMES and nic.gateway
            for address in _addresses(nic)
        ),
        servers=tuple(
            (address, tuple(filter(is_host, map(ip_address, nic.network_dns))))
            for nic in attachment.nics
            if nic.kind in WITH_NAMES and nic.network_dns
            for address in _addresses(nic)
        ),
        sharing=tuple(
            sorted(
                nic.target.uid
                for nic in attachment.nics
                if nic.target is not None and nic.target.spec.share_names
            )
        ),
    )


def _addresses(nic: Nic) -> list[IPv4Address]:
    found = (ip_interface(text).ip for text in nic.addresses)
    return [one for one in found if isinstance(one, IPv4Address)]
