"""Writes the node's list of images, `$KV.st.<node>._images`, for controllers."""

import asyncio
import logging

from virtbus.bus.client.ports import Bus, EntryKind
from virtbus.bus.errors import BusError
from virtbus.schemas import subjects
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.node import NodeImages
from virtbus.schemas.wire import encode, read

log = logging.getLogger(__name__)

PAUSE_S = 2.0
"""Delay between two writes. Pulls come in bursts, and placement can wait."""


class ImageReport:
    """Writes imaged's latest report if it differs from the stored list."""

    def __init__(self, bus: Bus, node: str, pause_s: float = PAUSE_S) -> None:
        self._bus = bus
        self._node = node
        self._pause_s = pause_s
        self._keys: tuple[str, ...] | None = None
        self._wake = asyncio.Event()

    def set_keys(self, keys: tuple[str, ...]) -> None:
        if keys != self._keys:
            self._keys = keys
            self._wake.set()

    async def run(self) -> None:
        stored: tuple[str, ...] | None = None
        while True:
            await self._wake.wait()
            self._wake.clear()
            try:
                stored = await self._read() if stored is None else stored
                if self._keys is not None and self._keys != stored:
                    value = NodeImages(node=self._node, keys=self._keys)
                    await self._bus.put(subjects.node_images(self._node), encode(value))
                    stored = value.keys
            except BusError as error:
                log.info(
                    "cannot write the list of images: %s", error, extra={"code": "images_late"}
                )
                stored = None
                self._wake.set()
            await asyncio.sleep(self._pause_s)

    async def _read(self) -> tuple[str, ...]:
        entry = await self._bus.get(subjects.node_images(self._node))
        if entry is None or entry.kind is not EntryKind.PUT:
            return ()
        try:
            return read(NodeImages, entry.value).keys
        except VirtbusError:
            return ("unreadable",)  # differs from every report, so `run` overwrites the list
