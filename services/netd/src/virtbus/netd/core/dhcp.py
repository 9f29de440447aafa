"""DHCP for one guest with one address (RFC 2131, 2132, 3396, 3397, 3442, 4578, 6842).

The guest's address never changes and no other client gets an answer, so no lease database is
needed. A guest is known by its tap. Client ids are returned, but otherwise ignored, because clones
share them. `answer` maps a request and the guest's `Offer` to a reply.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum
from ipaddress import IPv4Address, IPv4Interface, IPv4Network

from virtbus.netd.core.domain_names import domain_list, first_domains

_MAGIC = b"\x63\x82\x53\x63"
_FIXED = struct.Struct("!BBBBIHH4s4s4s4s16s64s128s")
_BOOTREQUEST, _BOOTREPLY = 1, 2
_ETHERNET = 1
_BROADCAST_FLAG = 0x8000
_MIN_MESSAGE_BYTES = 300
_DEFAULT_MAX_BYTES = 576
_HEADERS_BYTES = 28
_PAD, _END = 0, 255
_PART_BYTES = 2 + 255

ANY = IPv4Address(0)
BROADCAST = IPv4Address("255.255.255.255")


class MessageType(IntEnum):
    """Message types (option 53)."""

    DISCOVER = 1
    OFFER = 2
    REQUEST = 3
    DECLINE = 4
    ACK = 5
    NAK = 6
    RELEASE = 7
    INFORM = 8


class Option(IntEnum):
    """Option codes in use."""

    MASK = 1
    ROUTER = 3
    DNS = 6
    HOSTNAME = 12
    DOMAIN = 15
    MTU = 26
    BROADCAST = 28
    NTP = 42
    REQUESTED_ADDRESS = 50
    LEASE_TIME = 51
    MESSAGE_TYPE = 53
    SERVER_ID = 54
    MAX_SIZE = 57
    RENEWAL_TIME = 58
    REBINDING_TIME = 59
    CLIENT_ID = 61
    MACHINE_ID = 97
    SEARCH = 119
    CLASSLESS_ROUTES = 121


@dataclass(frozen=True, slots=True)
class DhcpRequest:
    """A client's message, reduced to the needed fields."""

    kind: int
    xid: int
    flags: int
    client: IPv4Address
    relay: IPv4Address
    mac: bytes
    options: dict[int, bytes]

    def address(self, option: int) -> IPv4Address | None:
        raw = self.options.get(option, b"")
        return IPv4Address(raw) if len(raw) == 4 else None

    @property
    def max_bytes(self) -> int:
        """The largest DHCP message that the client takes, without IP and UDP headers."""
        raw = self.options.get(Option.MAX_SIZE, b"")
        size = int.from_bytes(raw, "big") if len(raw) == 2 else 0
        return max(size, _DEFAULT_MAX_BYTES) - _HEADERS_BYTES


@dataclass(frozen=True, slots=True)
class Offer:
    """The guest's configuration. `domain` and `search` are valid domain names.

    `routes` are pairs of a network and its gateway. The gateway 0.0.0.0 marks a network on the
    link.
    """

    mac: bytes
    address: IPv4Interface
    server: IPv4Address
    server_mac: bytes
    router: IPv4Address | None = None
    dns: tuple[IPv4Address, ...] = ()
    ntp: tuple[IPv4Address, ...] = ()
    domain: str = ""
    search: tuple[str, ...] = ()
    hostname: str = ""
    mtu: int = 1500
    routes: tuple[tuple[IPv4Network, IPv4Address], ...] = ()
    lease_s: int = 3600


@dataclass(frozen=True, slots=True)
class DhcpAnswer:
    """A reply and its destination. Without `unicast`, the MAC and address are for broadcast."""

    kind: MessageType
    message: bytes
    destination: IPv4Address
    unicast: bool


@dataclass(frozen=True, slots=True)
class DhcpLease:
    """The address and router that another server gives a guest."""

    address: IPv4Interface
    router: IPv4Address | None = None


def lease_of(message: bytes, mac: bytes) -> DhcpLease | None:
    """Return the lease in a server's acknowledgement to `mac`; None for any other message."""
    if len(message) < _FIXED.size + 4 or message[_FIXED.size : _FIXED.size + 4] != _MAGIC:
        return None
    fields = _FIXED.unpack_from(message)
    options = _options(message[_FIXED.size + 4 :])
    given = IPv4Address(fields[8])
    if (fields[0], fields[11][:6]) != (_BOOTREPLY, mac) or options is None or given == ANY:
        return None
    if options.get(Option.MESSAGE_TYPE) != bytes((MessageType.ACK,)):
        return None
    routers = options.get(Option.ROUTER, b"")
    router = IPv4Address(routers[:4]) if len(routers) >= 4 else None
    try:
        mask = IPv4Address(options.get(Option.MASK, b"\xff\xff\xff\xff"))
        return DhcpLease(IPv4Interface(f"{given}/{mask}"), router)
    except ValueError:
        return None


def parse(message: bytes) -> DhcpRequest | None:
    """Return the request in a UDP payload; None for any other or incomplete message."""
    if len(message) < _FIXED.size + 4 or message[_FIXED.size : _FIXED.size + 4] != _MAGIC:
        return None
    fields = _FIXED.unpack_from(message)
    operation, hardware, length, _hops, xid, _secs, flags, client, _your, _next, relay = fields[:11]
    if (operation, hardware, length) != (_BOOTREQUEST, _ETHERNET, 6):
        return None
    options = _options(message[_FIXED.size + 4 :])
    kind = options.get(Option.MESSAGE_TYPE, b"") if options is not None else b""
    if options is None or len(kind) != 1:
        return None
    return DhcpRequest(
        kind=kind[0],
        xid=xid,
        flags=flags,
        client=IPv4Address(client),
        relay=IPv4Address(relay),
        mac=fields[11][:6],
        options=options,
    )


def _options(field: bytes) -> dict[int, bytes] | None:
    """Return the options by code; None if one is truncated.

    An option that was sent in several parts is joined (RFC 3396).
    """
    found: dict[int, bytes] = {}
    offset = 0
    while offset < len(field) and field[offset] != _END:
        code = field[offset]
        if code == _PAD:
            offset += 1
            continue
        if offset + 1 >= len(field) or offset + 2 + field[offset + 1] > len(field):
            return None
        end = offset + 2 + field[offset + 1]
        found[code] = found.get(code, b"") + field[offset + 2 : end]
        offset = end
    return found


def answer(request: DhcpRequest, offer: Offer) -> DhcpAnswer | None:
    """Return the reply to `request`, or None.

    Clients with other MACs get no reply, so that a guest cannot exhaust addresses (NET-06). Relays
    and clients of other servers get no reply either. DECLINE and RELEASE get no reply, because the
    guest keeps its address as long as the guest exists.
    """
    if request.mac != offer.mac or request.relay != ANY:
        return None
    match request.kind:
        case MessageType.DISCOVER:
            return _grant(MessageType.OFFER, request, offer)
        case MessageType.REQUEST:
            return _confirm(request, offer)
        case MessageType.INFORM:
            return _grant(MessageType.ACK, request, offer, leased=False)
        case _:
            return None


def _confirm(request: DhcpRequest, offer: Offer) -> DhcpAnswer | None:
    server = request.address(Option.SERVER_ID)
    if server is not None and server != offer.server:
        return None
    wanted = request.address(Option.REQUESTED_ADDRESS)
    if wanted is None and request.client != ANY:
        wanted = request.client
    if wanted is None:
        return None
    if wanted == offer.address.ip:
        return _grant(MessageType.ACK, request, offer)
    options = [
        (Option.MESSAGE_TYPE, bytes((MessageType.NAK,))),
        (Option.SERVER_ID, offer.server.packed),
        *_echo(request),
    ]
    message = _build(request, ANY, ANY, options, offer.mtu)
    return DhcpAnswer(MessageType.NAK, message, BROADCAST, unicast=False)


def _grant(
    kind: MessageType, request: DhcpRequest, offer: Offer, *, leased: bool = True
) -> DhcpAnswer:
    leases = [
        (Option.LEASE_TIME, struct.pack("!I", offer.lease_s)),
        (Option.RENEWAL_TIME, struct.pack("!I", offer.lease_s // 2)),
        (Option.REBINDING_TIME, struct.pack("!I", offer.lease_s * 7 // 8)),
    ]
    options = [
        (Option.MESSAGE_TYPE, bytes((kind,))),
        (Option.SERVER_ID, offer.server.packed),
        *(leases if leased else ()),
        *_echo(request),
        *_configuration(offer),
    ]
    yours = offer.address.ip if leased else ANY
    message = _build(request, request.client, yours, options, offer.mtu)
    if request.client != ANY:
        return DhcpAnswer(kind, message, request.client, unicast=True)
    if request.flags & _BROADCAST_FLAG or not leased:
        return DhcpAnswer(kind, message, BROADCAST, unicast=False)
    return DhcpAnswer(kind, message, yours, unicast=True)


def _echo(request: DhcpRequest) -> list[tuple[Option, bytes]]:
    """Return the client's identifiers, which a server must repeat (RFC 6842, RFC 4578)."""
    given = (
        (code, request.options.get(code, b"")) for code in (Option.CLIENT_ID, Option.MACHINE_ID)
    )
    return [(code, value) for code, value in given if 0 < len(value) <= 255]


def _configuration(offer: Offer) -> list[tuple[Option, bytes]]:
    """Return options in order of importance. `_build` drops options for which no room is left."""
    network = offer.address.network
    routes = guest_routes(offer)
    options = [(Option.MASK, network.netmask.packed)]
    if offer.router is not None:
        options.append((Option.ROUTER, offer.router.packed))
    if routes:
        options.append((Option.CLASSLESS_ROUTES, _classless(routes)))
    if offer.dns:
        options.append((Option.DNS, b"".join(server.packed for server in offer.dns[:8])))
    options.append((Option.MTU, struct.pack("!H", offer.mtu)))
    if network.prefixlen < 31:
        options.append((Option.BROADCAST, network.broadcast_address.packed))
    more = [
        (Option.HOSTNAME, offer.hostname.encode("ascii")),
        (Option.DOMAIN, offer.domain.encode("ascii")),
        (Option.NTP, b"".join(server.packed for server in offer.ntp[:8])),
        (Option.SEARCH, domain_list(offer.search)),
    ]
    return options + [(code, value) for code, value in more if value]


def guest_routes(offer: Offer) -> tuple[tuple[IPv4Network, IPv4Address], ...]:
    """Return the routes of option 121; empty if option 3 suffices.

    A client that reads option 121 ignores option 3 (RFC 3442), so option 121 repeats the default
    route. A router outside the guest's subnet (`ptp`, Calico) first needs a route on the link.
    """
    off_link = offer.router is not None and offer.router not in offer.address.network
    if not offer.routes and not off_link:
        return ()
    routes = list(offer.routes)
    if offer.router is not None:
        routes.append((IPv4Network("0.0.0.0/0"), offer.router))
        if off_link:
            routes.insert(0, (IPv4Network(offer.router), ANY))
    return tuple(routes)


def _classless(routes: tuple[tuple[IPv4Network, IPv4Address], ...]) -> bytes:
    parts = []
    for network, gateway in routes:
        significant = network.network_address.packed[: (network.prefixlen + 7) // 8]
        parts.append(bytes((network.prefixlen,)) + significant + gateway.packed)
    return b"".join(parts)


def _build(
    request: DhcpRequest,
    client: IPv4Address,
    yours: IPv4Address,
    options: list[tuple[Option, bytes]],
    mtu: int,
) -> bytes:
    """Return the message, with the options that fit the client's buffer and one packet.

    If not all search domains fit, the first ones are sent.
    """
    most_bytes = min(request.max_bytes, max(mtu, _DEFAULT_MAX_BYTES) - _HEADERS_BYTES)
    fixed = _FIXED.pack(
        *(_BOOTREPLY, _ETHERNET, 6, 0, request.xid, 0, request.flags),
        *(client.packed, yours.packed, bytes(4), bytes(4)),
        *(request.mac, b"", b""),
    )
    message = fixed + _MAGIC
    for code, value in options:
        room = most_bytes - len(message) - 1
        encoded = _option(code, _shortened(value, room) if code is Option.SEARCH else value)
        if len(encoded) <= room:
            message += encoded
    return (message + bytes((_END,))).ljust(_MIN_MESSAGE_BYTES, b"\0")


def _shortened(domains: bytes, room: int) -> bytes:
    heads = 2 * -(-room // _PART_BYTES)
    return first_domains(domains, room - heads)


def _option(code: int, value: bytes) -> bytes:
    """Return one option, in several parts if it is longer than 255 bytes (RFC 3396)."""
    parts = [value[start : start + 255] for start in range(0, len(value), 255)]
    return b"".join(bytes((code, len(part))) + part for part in parts)
