"""Serves the existing networks of this host without the bus: DHCP leases, names and rules.

The networks are in state files, so a netd that starts while the bus is away serves its guests. The
service begins once this host's agent has said in a file, or on the bus, that this host holds the
node. An outdated file is harmless: this host's guests run here even if another host now holds the
node.
"""

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from virtbus.bus.client.local_agent import LOOK_S, holds
from virtbus.bus.runtime.tasks import background, wait_for_event
from virtbus.netd.attachments import Attachments
from virtbus.netd.builder import HostPorts
from virtbus.netd.core.resolver_messages import FoundName, Lookup, NobodyAnswersError
from virtbus.netd.edge.groups_store import GroupsStore
from virtbus.netd.edge.namespaces import in_thread
from virtbus.netd.fleet_names import Ask
from virtbus.netd.forbidden_addresses import ForbiddenAddresses
from virtbus.netd.passt_watch import PasstWatch
from virtbus.netd.security_groups import SecurityGroups
from virtbus.netd.segment_guests import SegmentGuests
from virtbus.netd.settings import Settings

log = logging.getLogger(__name__)

PLUGIN_TABLE_LINGER_S = 20
"""Time after the last clean-up until the nftables table of plugin guests goes, if it is unused."""


class HostNetworks:
    """The networks of this host, with the services for their guests."""

    def __init__(self, settings: Settings, ports: HostPorts, word: Callable[[], str]) -> None:
        """`word` returns the text of the file in which the agent notes if it holds the node."""
        self.settings = settings
        self.ports = ports
        self._word = word
        self.attachments = Attachments(ports, settings.site())
        self.segments = SegmentGuests(ports, self.attachments)
        self.reach = ForbiddenAddresses(
            ports.attachers.bridges, settings, ports.resolver, self.segments.guard
        )
        store = GroupsStore(settings.state_dir / "netd" / "groups")
        self.groups = SecurityGroups(settings.node, ports, self.attachments, store)
        self.recovered = asyncio.Event()
        """Set once netd serves all networks of an earlier netd."""
        self._serving: asyncio.Task[None] | None = None
        self._settled = asyncio.Event()
        """Set at the end of the recovery, even after an error."""
        self._permitted = asyncio.Event()
        self._ask: Ask | None = None

    @functools.cached_property
    def passt(self) -> PasstWatch:
        return PasstWatch(self.ports.attachers.passt, self.attachments)

    @property
    def needed(self) -> bool:
        """True while guests of this host may depend on this process."""
        recovering = self._permitted.is_set() and not self.recovered.is_set()
        return recovering or bool(self.attachments.ready())

    def permit(self, ask: Ask) -> None:
        """Begin, because the bus has proved that this host's agent holds the node."""
        self._ask = ask
        self._permitted.set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Serve until the context ends. The networks stay and carry traffic afterwards."""
        try:
            async with background() as tasks:
                self._serving = tasks.start(self._serve())
                self._serving.add_done_callback(lambda _task: self._settled.set())
                yield
        finally:
            with contextlib.suppress(OSError):
                await self.attachments.tidy()  # removes unused Linux bridges
            self.ports.dhcp.close()
            self.ports.files.close()
            with contextlib.suppress(OSError):
                self.ports.attachers.plugin_reach.close()

    async def until_recovered(self) -> None:
        """Wait for `recovered`. Call this inside `running`.

        Raises the error that has ended the recovery. `running` also cancels its body after such an
        error, but Python 3.11 may lose this cancel.
        """
        await self._settled.wait()
        if self._serving is not None and self._serving.done():
            self._serving.result()

    async def _tidy(self) -> None:
        untidy = self.attachments.untidy
        while True:
            try:
                if not await wait_for_event(untidy, PLUGIN_TABLE_LINGER_S):
                    await in_thread(self.ports.attachers.plugin_reach.remove_unused)
                    await untidy.wait()
                await asyncio.sleep(self.settings.bridge_linger_s)
                await self.attachments.tidy()
            except OSError as error:
                log.warning("clean-up failed: %s", error, extra={"code": "tidy_failed"})
                untidy.set()

    async def _serve(self) -> None:
        while not (self._permitted.is_set() or holds(self._word())):
            await wait_for_event(self._permitted, LOOK_S)
        self._permitted.set()
        async with self.ports.resolver.running(self._asked):
            self.reach.restore()
            self.passt.begin()
            await self.attachments.recover()
            self.ports.resolver.complete()
            self.recovered.set()
            self._settled.set()
            if self._ask is None:
                count = len(self.attachments.ready())
                extra = {"code": "served_without_bus"}
                log.info("%d networks are served; the bus is awaited", count, extra=extra)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._tidy())
                group.create_task(self.reach.run())
                group.create_task(self.segments.run())
                group.create_task(self.passt.run())

    async def _asked(self, want: Lookup, uid: str) -> FoundName | None:
        if self._ask is None:
            raise NobodyAnswersError
        return await self._ask(want, uid)
