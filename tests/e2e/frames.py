"""Sends crafted frames from inside a booted guest, with a static program."""

import subprocess
from collections.abc import Iterable
from pathlib import Path

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
