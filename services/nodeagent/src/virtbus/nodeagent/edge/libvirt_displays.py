"""Connects to QEMU's VNC servers and takes screenshots, through libvirt.

QEMU 7.1 or newer makes the PNG of a screenshot.
"""

import asyncio
import os
import socket
from collections.abc import Callable
from typing import TypeVar

import libvirt

from virtbus.nodeagent.edge.libvirt_domains import on_ours
from virtbus.nodeagent.edge.libvirt_links import LibvirtLinks
from virtbus.nodeagent.edge.serial_calls import SerialCalls
from virtbus.schemas.errors import Code, VirtbusError

CONNECT_S = 5.0
SCREENSHOT_S = 10.0
MAX_PICTURE_BYTES = 32 * 1024 * 1024
PNG = "image/png"
_CHUNK_BYTES = 256 * 1024

Result = TypeVar("Result")


class LibvirtDisplays:
    """The displays of guests. A hanging QEMU occupies at most one connection of `links`."""

    def __init__(self, links: LibvirtLinks) -> None:
        self._links = links
        self._one_each = SerialCalls()

    async def connect(self, uid: str) -> socket.socket:
        """Return a new connection to the guest's VNC server.

        Raises:
            VirtbusError: 409 `no_display`: the VM has no display. 409 `domain_state`: no guest
                runs. 503 `display_busy`: an earlier call on this display has not ended. Also the
                errors of libvirt.
        """
        made: list[int] = []
        lost = False

        def run(domain: libvirt.virDomain) -> None:
            _check(domain)
            made.append(domain.openGraphicsFD(0, libvirt.VIR_DOMAIN_OPEN_GRAPHICS_SKIPAUTH))

        def ended() -> None:
            if lost:
                _close(made)

        try:
            await self._one(uid, run, "open the display", CONNECT_S, ended)
        except BaseException:
            lost = True
            _close(made)
            raise
        if not made:
            raise _off()
        return socket.socket(fileno=made.pop())

    async def screenshot(self, uid: str) -> bytes:
        """Return a picture of the display as a PNG.

        Raises:
            VirtbusError: the errors of `connect`. 422 `no_png`: QEMU cannot make a PNG, or the PNG
                is larger than MAX_PICTURE_BYTES.
        """

        def run(domain: libvirt.virDomain) -> tuple[str, bytes]:
            _check(domain)
            stream = domain.connect().newStream(0)
            kind = domain.screenshot(stream, 0, 0)
            picture = bytearray()
            while data := stream.recv(_CHUNK_BYTES):
                picture += data
                if len(picture) > MAX_PICTURE_BYTES:
                    stream.abort()
                    break
            else:
                stream.finish()
            return kind, bytes(picture)

        found = await self._one(uid, run, "take a picture of the display", SCREENSHOT_S)
        if found is None:
            raise _off()
        kind, picture = found
        if kind != PNG or len(picture) > MAX_PICTURE_BYTES:
            message = f"QEMU gave {len(picture)} bytes of {kind}, not a PNG; QEMU 7.1 or newer does"
            raise VirtbusError(Code.UNSUPPORTED, "no_png", message)
        return picture

    async def _one(
        self,
        uid: str,
        work: Callable[[libvirt.virDomain], Result],
        doing: str,
        timeout_s: float,
        ended: Callable[[], None] = lambda: None,
    ) -> Result | None:
        def both() -> None:
            self._one_each.end(uid)
            ended()

        try:
            async with asyncio.timeout(timeout_s):
                await self._one_each.begin(uid)
        except TimeoutError:
            message = "an earlier call on this guest's display has not ended; repeat in a moment"
            raise VirtbusError(Code.UNAVAILABLE, "display_busy", message, after_ms=5000) from None
        return await on_ours(self._links, uid, work, doing, timeout_s=timeout_s, ended=both)


def _close(made: list[int]) -> None:
    while made:
        os.close(made.pop())


def _check(domain: libvirt.virDomain) -> None:
    if not domain.isActive():
        raise _off()
    if "<graphics " not in domain.XMLDesc():
        message = (
            "the VM has no display; set spec.domain.devices.autoattach_graphics_device: true, "
            "then restart it"
        )
        raise VirtbusError(Code.CONFLICT, "no_display", message)


def _off() -> VirtbusError:
    message = "the guest is not running here; `virtbus vm get` shows its state"
    return VirtbusError(Code.CONFLICT, "domain_state", message)
