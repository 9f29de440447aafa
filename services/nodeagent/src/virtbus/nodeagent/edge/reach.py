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
_SOL_RAW, _ICMP_FILTER = 255, 1
_ONLY_ECHO_REPLIES = struct.pack("=I", ~1 & 0xFFFFFFFF)
"""`linux/icmp.h`: a bit for each ICMP type that is not delivered; type 0 is the echo reply."""


class Reach:
    """Asks guests for a sign of life, over one ICMP socket for all of them.

    A guest that never answers is asked for as long as it runs, so a question costs little.
    """

    def __init__(self, console_log: Callable[[str], Path]) -> None:
        self._console_log = console_log
        self._waiting: dict[str, asyncio.Future[bool]] = {}
        self._socket: socket.socket | None = None
        self._request = _echo_request()

    def open(self) -> None:
        """Open the ICMP socket where the process may; without it only the console counts."""
        with contextlib.suppress(PermissionError):
            self._socket = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
            self._socket.setblocking(False)
            # Else our own kernel's "unreachable" comes for each guest that still boots.
            self._socket.setsockopt(_SOL_RAW, _ICMP_FILTER, _ONLY_ECHO_REPLIES)
            asyncio.get_running_loop().add_reader(self._socket, self._receive)

    def close(self) -> None:
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
            self._socket = None

    async def answers(
        self,
        uid: str,
        interfaces: Callable[[], Sequence[InterfaceStatus]],
        *,
        rebooted: bool = False,
    ) -> str:
        """Why the guest counts as ready; waits as long as it takes."""
        console = _Console(self._console_log(uid))
        if rebooted:
            console.skip()
        delay_s = INTERVAL_S[0]
        while True:
            if console.says_ready():
                return "GuestSaysReady"
            addresses = (a.partition("/")[0] for i in interfaces() for a in i.addresses)
            address = next((a for a in addresses if ":" not in a), "")
            if await self._ping(address, delay_s):
                return "AddressAnswers"
            delay_s = min(delay_s * 1.1, INTERVAL_S[1])

    async def _ping(self, address: str, wait_s: float) -> bool:
        """One echo request; True when an answer came within `wait_s`, which always passes else."""
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[bool] = loop.create_future()
        timer = loop.call_later(wait_s, _settle, answered, False)
        if self._socket is not None and address:
            self._waiting[address] = answered
            with contextlib.suppress(OSError):
                self._socket.sendto(self._request, (address, 0))
        try:
            return await answered
        finally:
            timer.cancel()
            self._waiting.pop(address, None)

    def _receive(self) -> None:
        assert self._socket is not None  # noqa: S101  the reader is removed before the close
        with contextlib.suppress(BlockingIOError):
            while True:
                _packet, (address, _) = self._socket.recvfrom(2048)
                answered = self._waiting.get(address)
                if answered is not None:
                    _settle(answered, True)


class _Console:
    """A console's log, read again only when there is more of it."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._read_bytes = self._since_bytes = 0

    def skip(self) -> None:
        """Only what comes from now on counts."""
        with contextlib.suppress(OSError):
            self._read_bytes = self._since_bytes = self._log.stat().st_size

    def says_ready(self) -> bool:
        try:
            size_bytes = self._log.stat().st_size
            if size_bytes == self._read_bytes:
                return False
            self._read_bytes = size_bytes
            with self._log.open("rb") as log:
                log.seek(max(size_bytes - TAIL_BYTES, self._since_bytes))
                return MARKER in log.read(TAIL_BYTES)
        except OSError:
            return False


def _settle(future: "asyncio.Future[bool]", value: bool) -> None:
    if not future.done():
        future.set_result(value)


def _echo_request() -> bytes:
    """ICMP echo (RFC 792) with our pid as identifier."""
    body = struct.pack(">BBHHH", 8, 0, 0, os.getpid() & 0xFFFF, 1) + b"virtbus!"
    total = sum(struct.unpack(f">{len(body) // 2}H", body))
    total = (total >> 16) + (total & 0xFFFF)
    checksum = ~(total + (total >> 16)) & 0xFFFF
    return body[:2] + struct.pack(">H", checksum) + body[4:]
