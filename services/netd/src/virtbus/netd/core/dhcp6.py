"""DHCPv6 for one guest with fixed addresses (RFC 8415, 3646).

As with DHCP for IPv4, a guest is known by its tap. Its DUID is returned, but otherwise ignored.
The addresses never change, so no lease database is needed.
"""

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum, IntEnum
from ipaddress import IPv6Address, IPv6Interface, IPv6Network

from virtbus.netd.core.domain_names import domain_list, first_domains

_LEAST_BYTES = 4
_OPTION_BYTES = 4
_HEADERS_BYTES = 40 + 8
_MTU_MIN = 1280
_DUID_MAX_BYTES = 130
_IAS_MAX = 4
_ETHERNET = 1
_DUID_LL = 3


class MessageType6(IntEnum):
    """Message types in use."""

    SOLICIT = 1
    ADVERTISE = 2
    REQUEST = 3
    CONFIRM = 4
    RENEW = 5
    REBIND = 6
    REPLY = 7
    RELEASE = 8
    DECLINE = 9
    INFORMATION_REQUEST = 11


class Option6(IntEnum):
    """Option codes in use."""

    CLIENT_ID = 1
    SERVER_ID = 2
    IA_NA = 3
    IA_ADDRESS = 5
    STATUS = 13
    RAPID_COMMIT = 14
    DNS = 23
    DOMAINS = 24


class Status6(IntEnum):
    """Status codes in use."""

    SUCCESS = 0
    NO_ADDRESSES = 2
    NOT_ON_LINK = 4


class _Server(Enum):
    """The server that a message names."""

    NONE = 0
    OWN = 1
    OTHER = 2


@dataclass(frozen=True, slots=True)
class Offer6:
    """The guest's IPv6 configuration.

    `server` is the link-local source of all answers. If `router` is True, `server` is also the
    guest's default router.
    """

    mac: bytes
    addresses: tuple[IPv6Interface, ...]
    server: IPv6Address
    server_mac: bytes
    router: bool = True
    dns: tuple[IPv6Address, ...] = ()
    search: tuple[str, ...] = ()
    mtu: int = 1500
    lease_s: int = 3600
    routes: tuple[IPv6Network, ...] = ()
    """Networks that the guest reaches through `server`."""
    on_link: tuple[IPv6Network, ...] = ()
    """Networks on the link, in addition to those of the addresses."""

    @property
    def server_id(self) -> bytes:
        return struct.pack("!HH", _DUID_LL, _ETHERNET) + self.server_mac


@dataclass(frozen=True, slots=True)
class Request6:
    """A client's message, reduced to the needed fields.

    `ias` has the id of each identity association (IA), with the addresses that the client names in
    it.
    """

    kind: int
    transaction: bytes
    client_id: bytes
    server_id: bytes
    rapid: bool
    ias: tuple[tuple[bytes, tuple[IPv6Address, ...]], ...]


def parse6(message: bytes) -> Request6 | None:
    """Return the request in a UDP payload; None for any other or incomplete message."""
    if len(message) < _LEAST_BYTES:
        return None
    options = _options(message[4:])
    if options is None:
        return None
    ids = {code: value for code, value in options if code in {Option6.CLIENT_ID, Option6.SERVER_ID}}
    ias = [_ia(value) for code, value in options if code == Option6.IA_NA][:_IAS_MAX]
    if any(len(value) > _DUID_MAX_BYTES for value in ids.values()) or None in ias:
        return None
    return Request6(
        kind=message[0],
        transaction=message[1:4],
        client_id=ids.get(Option6.CLIENT_ID, b""),
        server_id=ids.get(Option6.SERVER_ID, b""),
        rapid=any(code == Option6.RAPID_COMMIT for code, _ in options),
        ias=tuple(ia for ia in ias if ia is not None),
    )


def _options(field: bytes) -> list[tuple[int, bytes]] | None:
    found = []
    offset = 0
    while offset < len(field):
        if offset + 4 > len(field):
            return None
        code, length = struct.unpack_from("!HH", field, offset)
        end = offset + 4 + length
        if end > len(field):
            return None
        found.append((code, field[offset + 4 : end]))
        offset = end
    return found


def _ia(value: bytes) -> tuple[bytes, tuple[IPv6Address, ...]] | None:
    options = _options(value[12:]) if len(value) >= 12 else None
    if options is None:
        return None
    addresses = (one for code, one in options if code == Option6.IA_ADDRESS)
    return value[:4], tuple(IPv6Address(one[:16]) for one in addresses if len(one) >= 24)


def answer6(request: Request6, offer: Offer6) -> bytes | None:
    """Return the reply to `request`, or None.

    A message for another server, or without the identifiers that RFC 8415 demands (section 16),
    gets no reply.
    """
    known = _ANSWERS.get(request.kind)
    if known is None:
        return None
    permitted, reply = known
    server = _Server.NONE
    if request.server_id:
        server = _Server.OWN if request.server_id == offer.server_id else _Server.OTHER
    anonymous = not request.client_id and request.kind != MessageType6.INFORMATION_REQUEST
    return None if anonymous or server not in permitted else reply(request, offer)


def _informed(request: Request6, offer: Offer6) -> bytes:
    return _reply(request, offer, [])


def _leased(request: Request6, offer: Offer6) -> bytes:
    return _reply(request, offer, list(_granted(request, offer)))


def _noted(request: Request6, offer: Offer6) -> bytes:
    """Confirm a release or decline. The guest keeps its addresses as long as the guest exists."""
    return _reply(request, offer, [_status(Status6.SUCCESS)])


def _solicited(request: Request6, offer: Offer6) -> bytes:
    granted = list(_granted(request, offer))
    if request.rapid:
        return _reply(request, offer, [_option(Option6.RAPID_COMMIT, b""), *granted])
    return _message(MessageType6.ADVERTISE, request, offer, granted)


def _confirmed(request: Request6, offer: Offer6) -> bytes | None:
    asked = [address for _, addresses in request.ias for address in addresses]
    if not asked:
        return None  # RFC 8415, 18.3.3
    own = {one.ip for one in offer.addresses}
    status = Status6.SUCCESS if own.issuperset(asked) else Status6.NOT_ON_LINK
    return _reply(request, offer, [_status(status)])


_NAMED, _UNNAMED = frozenset({_Server.OWN}), frozenset({_Server.NONE})
_ANSWERS: dict[int, tuple[frozenset[_Server], Callable[[Request6, Offer6], bytes | None]]] = {
    MessageType6.SOLICIT: (_UNNAMED, _solicited),
    MessageType6.REQUEST: (_NAMED, _leased),
    MessageType6.CONFIRM: (_UNNAMED, _confirmed),
    MessageType6.RENEW: (_NAMED, _leased),
    MessageType6.REBIND: (_UNNAMED, _leased),
    MessageType6.RELEASE: (_NAMED, _noted),
    MessageType6.DECLINE: (_NAMED, _noted),
    MessageType6.INFORMATION_REQUEST: (_NAMED | _UNNAMED, _informed),
}
"""By message type: the servers that a message may name, and the function that answers it."""


def _granted(request: Request6, offer: Offer6) -> Iterator[bytes]:
    """Yield each identity association. The first association has all addresses of the guest.

    An address that the client names and its association lacks gets lifetime zero.
    """
    for at, (iaid, asked) in enumerate(request.ias):
        own = [one.ip for one in offer.addresses] if at == 0 else []
        times = struct.pack("!II", offer.lease_s // 2, offer.lease_s * 7 // 8)
        inner = b"".join(_address(address, offer.lease_s) for address in own)
        inner += b"".join(_address(address, 0) for address in asked if address not in own)
        inner += b"" if own else _status(Status6.NO_ADDRESSES)
        yield _option(Option6.IA_NA, iaid + times + inner)


def _address(address: IPv6Address, lease_s: int) -> bytes:
    return _option(Option6.IA_ADDRESS, address.packed + struct.pack("!II", lease_s, lease_s))


def _status(code: Status6) -> bytes:
    return _option(Option6.STATUS, struct.pack("!H", code))


def _reply(request: Request6, offer: Offer6, options: list[bytes]) -> bytes:
    return _message(MessageType6.REPLY, request, offer, options)


def _message(kind: MessageType6, request: Request6, offer: Offer6, options: list[bytes]) -> bytes:
    parts = [bytes((kind,)) + request.transaction]
    if request.client_id:
        parts.append(_option(Option6.CLIENT_ID, request.client_id))
    parts += [_option(Option6.SERVER_ID, offer.server_id), *options]
    if offer.dns:
        parts.append(_option(Option6.DNS, b"".join(one.packed for one in offer.dns)))
    message = b"".join(parts)
    room = max(offer.mtu, _MTU_MIN) - _HEADERS_BYTES - len(message) - _OPTION_BYTES
    domains = first_domains(domain_list(offer.search), room)
    return message + _option(Option6.DOMAINS, domains) if domains else message


def _option(code: Option6, value: bytes) -> bytes:
    return struct.pack("!HH", code, len(value)) + value
