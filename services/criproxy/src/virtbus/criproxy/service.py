"""Assembles and runs the proxy: the two runtimes, the handlers, and the socket."""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress

from virtbus.bus.runtime.process import notify
from virtbus.bus.runtime.sources import REAL, Sources
from virtbus.criproxy.core import calls
from virtbus.criproxy.edge import grpc_server
from virtbus.criproxy.edge.grpc_server import Handler, Stream
from virtbus.criproxy.edge.last_answers import AnswerFolder
from virtbus.criproxy.edge.runtime_client import RuntimeClient
from virtbus.criproxy.event_streams import EventStreams
from virtbus.criproxy.image_calls import ImageCalls
from virtbus.criproxy.lists import Lists
from virtbus.criproxy.memory import Memory
from virtbus.criproxy.node_calls import NodeCalls
from virtbus.criproxy.owners import Owners
from virtbus.criproxy.pod_calls import PodCalls
from virtbus.criproxy.runtimes import Runtimes, open_runtimes
from virtbus.criproxy.settings import Settings

log = logging.getLogger(__name__)

KEEP_S = 2.0
"""Time limit, at a stop of the proxy, for storing the last answers of the runtimes."""


class CriProxy:
    """The proxy of one node."""

    def __init__(self, settings: Settings, sources: Sources = REAL) -> None:
        self._settings = settings
        self._sources = sources
        self._folder = AnswerFolder(settings.state_dir / "criproxy")
        self.memory = Memory()

    async def run(self) -> None:
        """Serve until cancelled, also while the runtimes are away.

        Raises:
            VirtbusError: 409 `criproxy_running`, `socket_taken`.
        """
        self._folder.open()
        try:
            async with self._runtimes() as runtimes:
                lists = Lists(runtimes, self.memory)
                handlers = {
                    calls.PATHS[name]: handler
                    for name, handler in self._handlers(runtimes, lists).items()
                }
                streams = {calls.PATHS[name]: lists.streamed for name in calls.STREAMS}
                streams[calls.PATHS[calls.EVENTS]] = EventStreams(runtimes).stream
                async with asyncio.TaskGroup() as group:
                    group.create_task(self.memory.run())
                    group.create_task(self._folder.sync())
                    await self._serve(handlers, streams)
        finally:
            self._folder.close()

    async def _serve(self, handlers: Mapping[str, Handler], streams: Mapping[str, Stream]) -> None:
        """Serve until cancelled. Then end the calls, and wait until their answers are kept."""
        try:
            async with grpc_server.serving(self._settings.socket, handlers, streams):
                log.info("ready", extra={"code": "ready"})
                notify("READY=1")
                await asyncio.get_running_loop().create_future()
        finally:
            with suppress(TimeoutError):
                async with asyncio.timeout(KEEP_S):
                    await self.memory.kept()

    @asynccontextmanager
    async def _runtimes(self) -> AsyncIterator[Runtimes]:
        settings = self._settings
        containers = RuntimeClient(f"unix:{settings.container_runtime}")
        vms = RuntimeClient(f"unix:{settings.vm_socket}")
        try:
            yield open_runtimes(containers, vms, self._folder, settings.answer_limit_s)
        finally:
            await containers.aclose()
            await vms.aclose()

    def _handlers(self, runtimes: Runtimes, lists: Lists) -> dict[str, Handler]:
        vm_handlers = self._settings.vm_handlers
        owners = Owners(runtimes)
        node = NodeCalls(runtimes, self.memory, self._settings.away_grace_s)
        pods = PodCalls(runtimes, owners, self.memory, vm_handlers, self._sources)
        images = ImageCalls(runtimes, owners, vm_handlers)
        return {
            **dict.fromkeys(calls.FIRST, node.first),
            calls.STATUS_OF_ALL: node.status,
            calls.UPDATE_ALL: node.update,
            calls.RUN: pods.run,
            **dict.fromkeys(calls.BY_ID, pods.by_id),
            **dict.fromkeys(calls.LISTS, lists.listed),
            calls.FILESYSTEMS: lists.filesystems,
            calls.IMAGE_STATUS: images.status,
            calls.PULL: images.pull,
            calls.REMOVE_IMAGE: images.remove,
        }
