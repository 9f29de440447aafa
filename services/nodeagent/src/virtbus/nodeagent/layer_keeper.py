"""Protects layers in the file system, and removes unneeded layers (ADR 0061).

imaged decides which layers are unneeded, because it knows all disks. The agent removes them, which
needs root: libvirt gives files of QEMU to QEMU's user, and a protected layer is immutable.
"""

import asyncio
import logging

from virtbus.bus.errors import BusError
from virtbus.bus.runtime.tasks import wait_for_event
from virtbus.nodeagent.agent_ports import AgentPorts
from virtbus.schemas import subjects
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.layer import LayersAsk, UnneededLayers
from virtbus.schemas.wire import validate

log = logging.getLogger(__name__)

SWEEP_S = 30.0
"""Interval of the search for unneeded layers."""
ASK_S = 30.0


class LayerKeeper:
    """Protects and removes the layers of a node."""

    def __init__(self, tools: AgentPorts) -> None:
        self._tools = tools
        self._new = asyncio.Event()

    def wake(self) -> None:
        self._new.set()

    async def run(self) -> None:
        while True:
            await wait_for_event(self._new, SWEEP_S)
            self._new.clear()
            try:
                if await self._tools.disks.protect_layers():
                    await self._sweep()
            except (BusError, VirtbusError, OSError) as error:
                log.info("layers are looked at later: %s", error, extra={"code": "layers_wait"})

    async def _sweep(self) -> None:
        subject = subjects.rpc(self._tools.settings.node, "imaged", "layers")
        answer = await self._tools.bus.request(subject, LayersAsk(), timeout_s=ASK_S)
        names = validate(UnneededLayers, answer).names
        if names:
            await self._tools.disks.remove_layers(names)
            log.info("removed %d unneeded layers", len(names), extra={"code": "layers_removed"})
