"""When a guest is ready: it answers a ping, or says GUEST-READY on its serial console."""

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

from virtbus.schemas.network import InterfaceStatus

INTERVAL_S = (0.25, 5.0)
MARKER = b"GUEST-READY"
TAIL_BYTES = 64 * 1024


class Reach:
    """Asks guests for a sign of life, over one ICMP socket for all of them."""

    def __init__(self, console_log: Callable[[str], Path]) -> None:
        self._console_log = console_log
        self._waiting: dict[str, asyncio.Event] = {}
        self._socket: socket.socket | None = None
        self._sequence = 0

    def open(self) -> None:
        """Open the ICMP socket where the process may; without it only the console counts."""
        with contextlib.suppress(PermissionError):
            self._socket = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
            self._socket.setblocking(False)
            asyncio.get_running_loop().add_reader(self._socket, self._receive)

    def close(self) -> None:
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
            self._socket = None

    async def answers(self, uid: str, interfaces: Callable[[], Sequence[InterfaceStatus]]) -> str:
        """Why the guest counts as ready; waits as long as it takes."""
        delay_s = INTERVAL_S[0]
        while True:
            if self._said_ready(uid):
                return "GuestSaysReady"
            addresses = [a.partition("/")[0] for i in interfaces() for a in i.addresses]
            addresses = [a for a in addresses if ":" not in a]
            if await self._ping(addresses[:1], delay_s):
                return "AddressAnswers"
            delay_s = min(delay_s * 1.1, INTERVAL_S[1])

    def _said_ready(self, uid: str) -> bool:
        try:
            with self._console_log(uid).open("rb") as log:
                log.seek(max(log.seek(0, os.SEEK_END) - TAIL_BYTES, 0))
                return MARKER in log.read(TAIL_BYTES)
        except OSError:
            return False

    async def _ping(self, addresses: list[str], wait_s: float) -> bool:
        """One echo request; True when an answer came within `wait_s`, which always passes else."""
        answered = asyncio.Event()
        if self._socket is not None and addresses:
            self._waiting[addresses[0]] = answered
            self._sequence = (self._sequence + 1) & 0xFFFF
            with contextlib.suppress(OSError):
                self._socket.sendto(_echo_request(self._sequence), (addresses[0], 0))
        try:
            async with asyncio.timeout(wait_s):
                await answered.wait()
        except TimeoutError:
            return False
        finally:
            for address in addresses:
                self._waiting.pop(address, None)
        return True

    def _receive(self) -> None:
        assert self._socket is not None  # noqa: S101  the reader is removed before the close
        with contextlib.suppress(BlockingIOError):
            while True:
                packet, (address, _) = self._socket.recvfrom(2048)
                header_bytes = (packet[0] & 15) * 4
                is_reply = packet[header_bytes : header_bytes + 1] == b"\0"
                if is_reply and address in self._waiting:
                    self._waiting[address].set()


def _echo_request(sequence: int) -> bytes:
    """ICMP echo (RFC 792) with our pid as identifier."""
    body = struct.pack(">BBHHH", 8, 0, 0, os.getpid() & 0xFFFF, sequence) + b"virtbus!"
    total = sum(struct.unpack(f">{len(body) // 2}H", body))
    total = (total >> 16) + (total & 0xFFFF)
    checksum = ~(total + (total >> 16)) & 0xFFFF
    return body[:2] + struct.pack(">H", checksum) + body[4:]
