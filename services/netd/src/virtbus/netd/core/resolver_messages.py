"""Messages between netd and the resolver's process, as JSON.

Both run as root on one host, and netd replaces a resolver whose code differs from netd's. The
messages therefore have no versions and no checks. This module imports no library, so that the
resolver's process stays small.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any

from virtbus.netd.core.guest_names import NamedVm

Message = Mapping[str, Any]
"""One message. Its first key is the kind of the message."""


@dataclass(frozen=True, slots=True)
class ResolverSite:
    """The settings of a resolver. netd adopts a resolver only if all its settings equal netd's."""

    version: str
    code: str
    """The digest of the process' source files. The same version may be deployed with other code."""
    node: str
    domain: str
    gateway: str
    """The gateway of the built-in network with its prefix length, such as 10.127.0.1/16."""
    gateway6: str
    servers: tuple[str, ...]
    socket: str
    """The path at which a later netd finds the process."""

    def text(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


def site_of(text: str) -> ResolverSite:
    """Parse the argument that `ResolverSite.text` made."""
    found = json.loads(text)
    return ResolverSite(**(found | {"servers": tuple(found["servers"])}))


@dataclass(frozen=True, slots=True)
class Lookup:
    """A question of a guest: a VM by `vm` and its namespace, or by its address.

    `asker` is the namespace of the guest, and `sharing` are its networks that share names. Answers
    depend on both, so both are part of the key under which an answer is stored.
    """

    asker: str
    namespace: str = ""
    vm: str = ""
    address: str = ""
    sharing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FoundName:
    """The answer of a controller (`schemas.names.NameAnswer`)."""

    found: bool = False
    node: str = ""
    namespace: str = ""
    name: str = ""
    addresses: tuple[str, ...] = ()


class NobodyAnswersError(Exception):
    """No controller can be asked now."""


def answer_message(number: int, found: FoundName | None, *, silent: bool = False) -> Message:
    """Return the answer to the question `number`.

    If `found` is None, the question was refused, or no controller answers (`silent`).
    """
    return {
        "answer": number,
        "silent": silent,
        "found": asdict(found) if found is not None else None,
    }


def answer_of(message: Message) -> FoundName | None:
    """Return the content of an answer. Raises NobodyAnswersError."""
    if message["silent"]:
        raise NobodyAnswersError
    found = message["found"]
    return FoundName(**(found | {"addresses": tuple(found["addresses"])})) if found else None


def vm_message(vm: NamedVm) -> Message:
    """Return the message with the name and the addresses of a VM."""
    return {
        "put": vm.uid,
        "namespace": vm.namespace,
        "name": vm.name,
        "built_in": _texts(vm.built_in),
        "built_in6": _texts(vm.built_in6),
        "others": _texts(vm.others),
        "networks": [(network, str(address)) for network, address in vm.networks],
        "gateways": [(str(address), str(gateway)) for address, gateway in vm.gateways],
        "servers": [(str(address), _texts(servers)) for address, servers in vm.servers],
        "sharing": vm.sharing,
    }


def vm_of_message(message: Message) -> NamedVm:
    """Return the VM of a `vm_message`."""
    return NamedVm(
        uid=message["put"],
        namespace=message["namespace"],
        name=message["name"],
        built_in=tuple(IPv4Address(one) for one in message["built_in"]),
        built_in6=tuple(IPv6Address(one) for one in message["built_in6"]),
        others=tuple(ip_address(one) for one in message["others"]),
        networks=tuple((network, ip_address(one)) for network, one in message["networks"]),
        gateways=tuple((IPv4Address(one), IPv4Address(gw)) for one, gw in message["gateways"]),
        servers=tuple(
            (IPv4Address(one), tuple(map(ip_address, servers)))
            for one, servers in message["servers"]
        ),
        sharing=tuple(message["sharing"]),
    )


def _texts(addresses: tuple[object, ...]) -> list[str]:
    return [str(address) for address in addresses]
