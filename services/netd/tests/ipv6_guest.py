"""The IPv6 side of a guest in user space: neighbour discovery, echo, DHCPv6."""

import struct
from ipaddress import IPv6Address

from services.netd.tests.pretended_host import Guest, checksum

from virtbus.netd.core.dhcp6 import Option6
from virtbus.netd.core.ipv6_frame import link_local_of

ALL_ROUTERS, ALL_SERVERS = IPv6Address("ff02::2"), IPv6Address("ff02::1:2")
ICMP6, TCP, UDP = 58, 6, 17
CLIENT_ID = struct.pack("!HH", 3, 1) + bytes(6)


class Frames6:
    """Makes frames of a guest with a MAC and an IPv6 address."""

    def __init__(self, mac: bytes, address: IPv6Address) -> None:
        self.mac = mac
        self.address = address
        self.link_local = link_local_of(mac)

    def frame(
        self,
        to: bytes,
        destination: IPv6Address,
        protocol: int,
        content: bytes,
        *,
        source: IPv6Address | None = None,
        hops: int = 255,
        inner: int | None = None,
    ) -> bytes:
        """Return a frame with the right checksum. `inner` is the protocol behind an extension."""
        sender = self.address if source is None else source
        kind = protocol if inner is None else inner
        pseudo = sender.packed + destination.packed + struct.pack("!II", len(content), kind)
        at = {ICMP6: 2, TCP: 16}.get(kind, 6)
        total = checksum(pseudo + content)
        content = content[:at] + struct.pack("!H", total) + content[at + 2 :]
        head = struct.pack("!IHBB", 6 << 28, len(content), protocol, hops)
        return to + self.mac + b"\x86\xdd" + head + sender.packed + destination.packed + content

    def solicitation(
        self, target: IPv6Address, *, source: IPv6Address | None = None, more: bytes = b""
    ) -> bytes:
        group = IPv6Address(int(IPv6Address("ff02::1:ff00:0")) | int(target) & 0xFFFFFF)
        content = struct.pack("!BBHI", 135, 0, 0, 0) + target.packed
        if source != IPv6Address(0):
            content += b"\1\1" + self.mac
        return self.frame(_mac_of(group), group, ICMP6, content + more, source=source)

    def advertisement(
        self, target: IPv6Address, *, source: IPv6Address | None = None, more: bytes = b""
    ) -> bytes:
        content = struct.pack("!BBHI", 136, 0, 0, 0x20000000) + target.packed
        content += b"\2\1" + self.mac + more
        everybody = IPv6Address("ff02::1")
        return self.frame(_mac_of(everybody), everybody, ICMP6, content, source=source)

    def udp(self, ports: tuple[int, int], data: bytes, to: IPv6Address = ALL_SERVERS) -> bytes:
        content = struct.pack("!HHHH", *ports, 8 + len(data), 0) + data
        return self.frame(_mac_of(to), to, UDP, content, source=self.link_local)


class Guest6(Frames6):
    """A guest with an IPv6 address. It sends what a test tells it to."""

    def __init__(self, guest: Guest, address: IPv6Address) -> None:
        super().__init__(guest.mac, address)
        self.guest = guest

    async def resolve(self, target: IPv6Address) -> bytes:
        """Return the MAC of a neighbour."""
        for _attempt in range(20):
            self.guest.send(self.solicitation(target))
            try:
                frame = await self.guest.receive(
                    lambda f: f[20] == ICMP6 and f[54] == 136 and f[62:78] == target.packed, 0.25
                )
            except TimeoutError:
                continue
            return frame[6:12]
        raise TimeoutError(f"{target} does not answer")

    async def ping(self, address: IPv6Address, via: IPv6Address | None = None) -> None:
        """Return once an echo reply of `address` came; TimeoutError if none does."""
        mac = await self.resolve(via or address)
        echo = struct.pack("!BBHHH", 128, 0, 0, 7, 1) + b"virtbus"
        self.guest.send(self.frame(mac, address, ICMP6, echo))
        await self.guest.receive(
            lambda f: (
                f[12:14] == b"\x86\xdd"
                and f[20] == ICMP6
                and f[54] == 129
                and f[22:38] == address.packed
            )
        )

    async def ask(self, kind: int, *options: bytes) -> tuple[int, bytes]:
        """Send a DHCPv6 message until it is answered; return the type and options of the answer.

        The kernel sends nothing to a tap in the first moments after a guest opened it.
        """
        message = bytes((kind,)) + b"abc" + option(Option6.CLIENT_ID, CLIENT_ID) + b"".join(options)
        for _attempt in range(20):
            self.guest.send(self.udp((546, 547), message))
            try:
                reply = await self.guest.receive(
                    lambda f: f[20] == UDP and f[54:58] == b"\x02\x23\x02\x22", 0.5
                )
            except TimeoutError:
                continue
            break
        else:
            raise TimeoutError(f"no answer to {kind}")
        assert reply[63:66] == b"abc"
        pseudo = reply[22:54] + struct.pack("!II", len(reply) - 54, UDP)
        assert checksum(pseudo + reply[54:]) == 0
        return reply[62], reply[66:]


def option(code: int, value: bytes) -> bytes:
    return struct.pack("!HH", code, len(value)) + value


def ia(*addresses: IPv6Address) -> bytes:
    inner = b"".join(option(5, one.packed + bytes(8)) for one in addresses)
    return option(3, b"\0\0\0\7" + bytes(8) + inner)


def _mac_of(group: IPv6Address) -> bytes:
    return b"\x33\x33" + group.packed[-4:]
