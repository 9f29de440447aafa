"""Ports of a host that lead to a port of a guest."""

from ipaddress import IPv4Address
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, StringConstraints

from virtbus.schemas.model import StrictModel
from virtbus.schemas.quantity import Count

PORT_MAX = 65_535
PUBLISHED_MAX = 32
"""Published ports of one interface."""
EVERY_ADDRESS = "0.0.0.0"  # noqa: S104  shown in messages; no socket is bound to it
Protocol = Literal["tcp", "udp"]


def _host_address(text: str) -> str:
    address = IPv4Address(text)
    if address.is_loopback or address.is_unspecified or address.is_multicast:
        msg = "must be an IPv4 address by which others reach the host; without it, all are used"
        raise ValueError(msg)
    return str(address)


HostAddress = Annotated[str, StringConstraints(max_length=15), AfterValidator(_host_address)]


class PublishedPort(StrictModel):
    """A port of the VM's host that leads to `guest_port` of the guest."""

    host_port: Count = Field(ge=1, le=PORT_MAX)
    guest_port: Count = Field(ge=1, le=PORT_MAX)
    protocol: Protocol = "tcp"
    host_address: HostAddress | None = None
    """None: every address of the host, except loopback."""

    def clashes(self, other: "PublishedPort") -> bool:
        """Return True if a packet to one port could be meant for the other."""
        mine, others = self.host_address, other.host_address
        same = (self.protocol, self.host_port) == (other.protocol, other.host_port)
        return same and (mine is None or others is None or mine == others)

    @property
    def place(self) -> str:
        """Return the host's side in words: `0.0.0.0:8080/tcp`."""
        return f"{self.host_address or EVERY_ADDRESS}:{self.host_port}/{self.protocol}"

    def __str__(self) -> str:
        """Return the port as `virtbus vm get` shows it: `0.0.0.0:8080->80/tcp`."""
        host = self.host_address or EVERY_ADDRESS
        return f"{host}:{self.host_port}->{self.guest_port}/{self.protocol}"
