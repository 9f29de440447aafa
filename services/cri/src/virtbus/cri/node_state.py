"""Reads the state of the node from the bus at intervals, and stores the last answer."""

import asyncio
import logging

from virtbus.cri.core import node
from virtbus.cri.core.answers import Plain
from virtbus.cri.core.node import KnownNode
from virtbus.cri.core.vm_request import Place
from virtbus.cri.edge.bus_link import BusLink
from virtbus.cri.edge.store import RecordFolder
from virtbus.schemas.api import NodeDetail, NodeRef
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.wire import validate

log = logging.getLogger(__name__)

LOOK_S = 10.0
FIRST_LOOK_S = 0.5


class NodeKeeper:
    """The last known state of the node, for CRI's Status and for the `Place` of its pods."""

    def __init__(
        self, folder: RecordFolder[KnownNode], link: BusLink, name: str, network: str
    ) -> None:
        self._folder = folder
        self._link = link
        self._name = name
        self._network = network
        self._known: KnownNode | None = None
        self._failure = ""
        self._seen = asyncio.Event()

    @property
    def place(self) -> Place:
        return Place(self._known.hostname if self._known else self._name, self._network)

    async def hostname(self) -> str:
        """Wait until the node is known; return its label `kubernetes.io/hostname`."""
        await self._seen.wait()
        return self.place.hostname

    def load(self) -> None:
        """Read the last answer from disk, before the first call."""
        self._known = self._folder.load().get(self._name)
        if self._known is not None:
            self._seen.set()

    async def run(self) -> None:
        while True:
            try:
                answer = await self._link.ask("node", "get", NodeRef(node=self._name))
                seen = node.known(validate(NodeDetail, answer).node)
                self._failure = ""
                if seen != self._known:
                    self._known = seen
                    self._seen.set()
                    await self._folder.put(self._name, seen)
            except VirtbusError as error:
                self._failure = str(error)
                log.debug("node state: %s", error)
            await asyncio.sleep(FIRST_LOOK_S if self._failure else LOOK_S)

    def conditions(self) -> list[Plain]:
        problem = "" if self._link.connected else self._failure or self._link.refusal
        return node.conditions(self._known, problem)
