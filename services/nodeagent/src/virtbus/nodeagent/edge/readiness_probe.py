"""Waits until a guest is ready: it answers a ping, or prints GUEST-READY on its serial console."""

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
"""A filter of `linux/icmp.h`. Each bit drops one ICMP type. Type 0, the echo reply, passes."""


class ReadinessProbe:
    """The `Readiness` port.

    A probe must be cheap, because a guest that never answers is probed for as long as it runs.
    """

    def __init__(self, console_log: Callable[[str], Path]) -> None:
        self._console_log = console_log
        self._request = _echo_request()
        self._may_ping = False
        """True if this process may open raw sockets. If False, only the console is read."""
        with contextlib.suppress(PermissionError), _raw():
            self._may_ping = True

    async def answers(
        self,
        uid: str,
        interfaces: Callable[[], Sequence[InterfaceStatus]],
        *,
        rebooted: bool = False,
    ) -> str:
        """Wait until the guest is ready; return `GuestSaysReady` or `AddressAnswers`.

        With `rebooted`, ignore earlier console output.
        """
        console = _Console(self._console_log(uid))
        if rebooted:
            console.skip()
        delay_s = INTERVAL_S[0]
        with contextlib.closing(_Pings(self._request)) as pings:
            while True:
                if console.says_ready():
                    return "GuestSaysReady"
                addresses = (a.partition("/")[0] for i in interfaces() for a in i.addresses)
                address = next((a for a in addresses if ":" not in a), "")
                if await pings.ping(address if self._may_ping else "", delay_s):
                    return "AddressAnswers"
                delay_s = min(delay_s * 1.1, INTERVAL_S[1])


class _Pings:
    """Pings one guest through a socket that is connected to the guest's address.

    The kernel drops packets from other addresses. The first answer ends the probe, so that a flood
    of answers costs one read (ADR 0029).
    """

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._socket: socket.socket | None = None
        self._address = ""
        self._woken: asyncio.Future[bool] | None = None

    async def ping(self, address: str, wait_s: float) -> bool:
        """Send one echo request; return True after an answer, or False after `wait_s`.

        With an empty address, send nothing and wait `wait_s`.
        """
        loop = asyncio.get_running_loop()
        woken: asyncio.Future[bool] = loop.create_future()
        self._woken = woken
        timer = loop.call_later(wait_s, _settle, woken, False)
        try:
            self._send(address)
        except OSError:
            self.close()
        try:
            return await woken
        finally:
            timer.cancel()

    def _send(self, address: str) -> None:
        if address != self._address:
            self.close()
        if self._socket is None and address:
            self._socket, self._address = _raw(), address
            self._socket.connect((address, 0))
            asyncio.get_running_loop().add_reader(self._socket, self._receive)
        if self._socket is not None:
            self._socket.send(self._request)

    def _receive(self) -> None:
        assert self._socket is not None  # noqa: S101  the reader is removed before the close
        with contextlib.suppress(OSError):
            _packet, (source, _) = self._socket.recvfrom(64)
            # Before `connect`, the socket may have received a packet from another address.
            if source == self._address and self._woken:
                _settle(self._woken, True)

    def close(self) -> None:
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
        self._socket, self._address = None, ""


class _Console:
    """A console's log. The log is read only after its size has changed."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._read_bytes = self._since_bytes = 0

    def skip(self) -> None:
        with contextlib.suppress(OSError):
            self._read_bytes = self._since_bytes = self._log.stat().st_size

    def says_ready(self) -> bool:
        try:
            size_bytes = self._log.stat().st_size
            if size_bytes == self._read_bytes:
                return False
            self._read_bytes = size_bytes
            if size_bytes < self._since_bytes:  # virtlogd has begun a new file
                self._since_bytes = 0
            with self._log.open("rb") as log:
                log.seek(max(size_bytes - TAIL_BYTES, self._since_bytes))
                return MARKER in log.read(TAIL_BYTES)
        except OSError:
            return False


def _settle(future: "asyncio.Future[bool]", value: bool) -> None:
    if not future.done():
        future.set_result(value)


def _raw() -> socket.socket:
    """Return a socket for echo replies; raises PermissionError."""
    raw = socket.socket(socket.AF_INET, socket.SOCK_RAW | socket.SOCK_NONBLOCK, socket.IPPROTO_ICMP)
    # The filter drops the host's own "unreachable" messages, which arrive while a guest boots.
    raw.setsockopt(_SOL_RAW, _ICMP_FILTER, _ONLY_ECHO_REPLIES)
    return raw


def _echo_request() -> bytes:
    """Return an ICMP echo request (RFC 792) with the agent's pid as identifier."""
    body = struct.pack(">BBHHH", 8, 0, 0, os.getpid() & 0xFFFF, 1) + b"virtbus!"
    total = sum(struct.unpack(f">{len(body) // 2}H", body))
    total = (total >> 16) + (total & 0xFFFF)
    checksum = ~(total + (total >> 16)) & 0xFFFF
    return body[:2] + struct.pack(">H", checksum) + body[4:]
