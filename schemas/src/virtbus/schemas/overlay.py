"""Overlays: networks that connect guests of several hosts by tunnels between the hosts."""

from pydantic import Field

from virtbus.schemas.ids import Id, Uid
from virtbus.schemas.model import SCHEMA_VERSION, LenientModel

ENCAPSULATION_BYTES = 50
"""The bytes that VXLAN over IPv4 adds to a guest's packet: Ethernet, VXLAN, UDP and IP headers."""
VNI_MAX = 2**24 - 1
MEMBERS_MAX = 2000
"""Other hosts learn of at most this number of a network's interfaces on one host."""


TUNNEL_PORT = 14789
"""The UDP port of the tunnels. VXLAN's own port stays free for other software."""


class TunnelEnd(LenientModel):
    """The end of a host's tunnels: its address on the underlay, and the underlay's MTU."""

    address: str
    mtu: int


class OverlayMember(LenientModel):
    """An interface of a guest, with the MAC and the addresses that other hosts send to."""

    mac: str
    addresses: tuple[str, ...] = ()


class OverlayPeer(LenientModel):
    """`$KV.vm.<node>.<network>.<peer>._peer`: the guests of a network on another host.

    Controllers write this key by CAS, if `node` has guests of the network, too.
    """

    schema_version: int = SCHEMA_VERSION
    node: Id
    network: Uid
    peer: Id
    address: str
    members: tuple[OverlayMember, ...] = Field((), max_length=MEMBERS_MAX)
