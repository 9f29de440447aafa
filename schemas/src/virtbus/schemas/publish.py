"""Ports of a host that lead to a port of a guest."""

from collections.abc import Collection
from ipaddress import IPv6Address, ip_address
from operator import not_
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    Field,
    StringConstraints,
    ValidationInfo,
    field_validator,
)

from virtbus.schemas.model import StrictModel
from virtbus.schemas.overlay import TUNNEL_PORT
from virtbus.schemas.quantity import Count

PORT_MAX = 65_535
PUBLISHED_MAX = 32
"""The most published ports of one interface."""
GUEST_PORTS_MAX = 64
"""The most declared ports or ranges of ports of one interface."""
EVERY_ADDRESS = "0.0.0.0"  # noqa: S104  shown in messages; no socket is bound to it
EVERY_ADDRESS6 = "::"
Protocol = Literal["tcp", "udp"]


def _host_address(text: str) -> str:
    address = ip_address(text)
    if isinstance(address, IPv6Address):  # one form for each IPv4 address, for `clashes`
        address = address.ipv4_mapped or address
    wrong = address.is_loopback or address.is_unspecified or address.is_multicast
    if wrong or address.is_link_local or "%" in text:
        msg = "must be an address by which others reach the host; without it, all are used"
        raise ValueError(msg)
    return str(address)


HostAddress = Annotated[str, StringConstraints(max_length=45), AfterValidator(_host_address)]


class GuestPort(StrictModel):
    """A port of the guest, or the ports from `port` to `last_port`."""

    port: Count = Field(ge=1, le=PORT_MAX)
    last_port: Count | None = Field(None, ge=1, le=PORT_MAX, exclude_if=not_)
    protocol: Protocol = "tcp"

    @field_validator("last_port")
    @classmethod
    def _ordered(cls, last: int | None, info: ValidationInfo) -> int | None:
        if last is not None and last < info.data.get("port", 0):
            msg = "must not be below port"
            raise ValueError(msg)
        return last

    @property
    def range(self) -> tuple[int, int]:
        return self.port, self.last_port or self.port

    @property
    def text(self) -> str:
        """Return the ports in words: `80/tcp`, `8000-8080/tcp`."""
        first, last = self.range
        return f"{first if first == last else f'{first}-{last}'}/{self.protocol}"

    def has(self, port: int, protocol: str) -> bool:
        first, last = self.range
        return protocol == self.protocol and first <= port <= last


class PublishedPort(StrictModel):
    """A port of the VM's host that leads to `guest_port` of the guest."""

    host_port: Count = Field(ge=1, le=PORT_MAX)
    guest_port: Count = Field(ge=1, le=PORT_MAX)
    protocol: Protocol = "tcp"
    host_address: HostAddress | None = None
    """None means every address of the host without loopback. An IPv6 address needs a guest with
    IPv6."""

    def clashes(self, other: "PublishedPort") -> bool:
        """Return True if one packet could be meant for both ports."""
        mine, others = self.host_address, other.host_address
        same = (self.protocol, self.host_port) == (other.protocol, other.host_port)
        return same and (mine is None or others is None or mine == others)

    def has(self, version: int) -> bool:
        """Return True if packets of the IP version `version` may come to the port."""
        return self.host_address is None or ip_address(self.host_address).version == version

    @property
    def is_of_tunnels(self) -> bool:
        return (self.protocol, self.host_port) == ("udp", TUNNEL_PORT)

    @property
    def place(self) -> str:
        """Return the host's side in words: `0.0.0.0:8080/tcp`, `[2001:db8::1]:8080/tcp`."""
        return f"{_bracketed(self.host_address or EVERY_ADDRESS)}:{self.host_port}/{self.protocol}"

    def shown(self, versions: Collection[int]) -> tuple[str, ...]:
        """Return the port as `virtbus vm get` shows it, for each IP version of the guest."""
        every = {4: EVERY_ADDRESS, 6: EVERY_ADDRESS6}
        return tuple(
            f"{_bracketed(self.host_address or every[version])}:{self.host_port}"
            f"->{self.guest_port}/{self.protocol}"
            for version in (4, 6)
            if version in versions and self.has(version)
        )


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address
