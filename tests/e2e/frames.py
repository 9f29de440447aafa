"""Sends crafted frames from inside a booted guest, with a static program."""

import struct
import subprocess
from collections.abc import Iterable
from ipaddress import IPv6Address, IPv6Interface
from pathlib import Path

from services.netd.tests.ipv6_guest import ICMP6, UDP, Frames6
from services.netd.tests.pretended_host import Frames
from services.netd.tests.segment import crafted
from tests.e2e.login import Login
from tests.e2e.platform import Json

_SENDER = r"""
#include <net/if.h>
#include <netpacket/packet.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
int main(int argc, char **argv) {
    char line[8192];
    struct sockaddr_ll to = {.sll_family = AF_PACKET, .sll_ifindex = if_nametoindex(argv[1])};
    int fd = socket(AF_PACKET, SOCK_RAW, 0), sent = 0;
    while (fgets(line, sizeof line, stdin)) {
        unsigned char frame[2048];
        unsigned byte, size = 0;
        while (size < sizeof frame && sscanf(line + 2 * size, "%2x", &byte) == 1)
            frame[size++] = byte;
        sent += sendto(fd, frame, size, 0, (struct sockaddr *)&to, sizeof to) == (int)size;
    }
    printf("%d\n", sent);
    return argc != 2;
}
"""


class Crafter:
    """Sends frames from the interfaces of one guest."""

    def __init__(self, folder: Path, login: Login, view: Json) -> None:
        source, program = folder / "send.c", folder / "send"
        source.write_text(_SENDER)
        build = ["gcc", "-static", "-s", "-O1", "-o", str(program), str(source)]
        subprocess.run(build, check=True)
        self._login, self._view = login, view
        login.give(view, program.read_bytes(), "/tmp/send")

    def send(self, link: str, frames: Iterable[bytes]) -> int:
        """Send frames from `link` of the guest; return how many its kernel took."""
        lines = "\\n".join(frame.hex() for frame in frames)
        return int(self._login(self._view, f"printf '{lines}\\n' | /tmp/send {link}"))


def spoofed(nic: Json, *, on_segment: bool = False) -> list[tuple[str, bytes]]:
    """Return frames that must not leave an interface, each with the rule that counts it."""
    four = next(one for one in nic["addresses"] if ":" not in one)
    six = [IPv6Interface(one).ip for one in nic["addresses"] if ":" in one]
    frames = Frames(nic["mac"], four)
    found = [
        (rule, frame)
        for name, (rule, frame) in crafted(frames).items()
        if (on_segment or rule != "reach") and not (six and name in {"router-adv", "neighbour-adv"})
    ]
    return found + (_spoofed6(frames.mac, six[0]) if six else [])


def _spoofed6(mac: bytes, address: IPv6Address) -> list[tuple[str, bytes]]:
    guest = Frames6(mac, address)
    nodes, everybody = IPv6Address("ff02::1"), bytes.fromhex("333300000001")
    other, own = IPv6Address(int(address) ^ 0x7777), guest.link_local
    fake = struct.pack("!HHHH", 547, 546, 12, 0) + b"fake"
    plain = struct.pack("!HHHH", 1000, 1000, 12, 0) + b"fake"
    return [
        ("ra", guest.frame(everybody, nodes, ICMP6, bytes((134, *bytes(15))), source=own)),
        (
            "redirect",
            guest.frame(everybody, nodes, ICMP6, bytes((137, *bytes(39))), source=own),
        ),
        ("nd", guest.advertisement(other)),
        ("dhcp6", guest.frame(everybody, nodes, UDP, fake, source=own)),
        ("address6", guest.frame(everybody, nodes, UDP, plain, source=other)),
    ]
