"""Starts or adopts the resolver's process, and sends it the names of VMs.

The process outlives netd, so guests resolve names while netd is away. netd replaces a process with
other code or settings once it knows all VMs, and kills a hung process.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from ipaddress import IPv4Address, IPv4Interface

from virtbus.bus.runtime.backoff import delays
from virtbus.bus.runtime.tasks import Background, background, wait_for_event
from virtbus.netd import resolver_start
from virtbus.netd.core.attachment import Attachment
from virtbus.netd.core.guest_names import NamedVm
from virtbus.netd.core.named_vm import vm_of
from virtbus.netd.core.resolver_messages import (
    FoundName,
    Lookup,
    Message,
    NobodyAnswersError,
    ResolverSite,
    answer_message,
    vm_message,
)
from virtbus.netd.edge.resolver_channel import ResolverChannel
from virtbus.netd.fleet_names import Ask
from virtbus.netd.resolver_start import PortTakenError, end_hung

log = logging.getLogger(__name__)

START_S = 10.0
"""netd's start waits this long for the process. Later, the process starts in the background."""
END_S = 10.0
FIRST_RETRY_S, LAST_RETRY_S = 0.5, 60.0
QUIET_S, HANG_S = 15.0, 45.0
"""A process that sends nothing for QUIET_S gets a ping. After further HANG_S of silence, it is
hung.
"""


class NamesKeeper:
    """Serves each VM from `serve` to `stop`, but only within `running`."""

    def __init__(self, site: ResolverSite) -> None:
        """If the site's domain is empty, guests get no resolver."""
        self._site = site
        self._vms: dict[str, NamedVm] = {}
        self._served = False
        self._channel: ResolverChannel | None = None
        self._all_known = asyncio.Event()
        """Set when all VMs of the host are known."""
        self._decided = asyncio.Event()
        """Set when the port is known to be free or taken, or after START_S."""
        self._gone = asyncio.Event()
        """Set when an unused process has ended."""

    @property
    def domain(self) -> str:
        """Empty if names are not served."""
        return self._site.domain if self._served else ""

    @property
    def addresses(self) -> tuple[IPv4Address, ...]:
        """The address to which guests send queries; empty if names are not served."""
        return (IPv4Interface(self._site.gateway).ip,) if self._served else ()

    @asynccontextmanager
    async def running(self, ask: Ask) -> AsyncIterator[None]:
        """Serve names if the site has a domain, and if the port is free.

        At the end, netd ends the process if netd knows all VMs and none needs the process. In all
        other cases, the process stays.
        """
        async with background() as tasks:
            self._served = bool(self._site.domain)
            tasks.start(self._keep(ask, tasks) if self._served else self.end())
            if self._served:
                await wait_for_event(self._decided, START_S)
                self._decided.set()
            try:
                yield
            finally:
                self._served = False
                if self._all_known.is_set() and not self._vms and self._channel is not None:
                    await self._part(self._channel)

    async def end(self) -> None:
        """End the process, for a replacement, an uninstall, or an empty setting `zone`."""
        if (found := await resolver_start.found(self._site)) is not None:
            await resolver_start.end(found.channel, self._site)

    # --- VMs ------------------------------------------------------------------------------
    def serve(self, attachment: Attachment) -> None:
        """Give the VM its name, and answer queries from its addresses. Idempotent."""
        if self._served:
            vm = self._vms[attachment.uid] = vm_of(attachment)
            self._send(vm_message(vm))

    def stop(self, uid: str) -> None:
        self._vms.pop(uid, None)
        self._send({"remove": uid})

    def complete(self) -> None:
        """Note that all VMs of the host are known. The process forgets all other VMs."""
        self._all_known.set()
        self._send({"only": list(self._vms)})

    def _send(self, message: Message) -> None:
        if self._channel is not None:
            self._channel.send(message)

    async def _part(self, channel: ResolverChannel) -> None:
        self._channel = None
        channel.send({"end": True})
        if not await wait_for_event(self._gone, END_S):
            await end_hung(self._site)

    # --- the process ----------------------------------------------------------------------
    async def _keep(self, ask: Ask, tasks: Background) -> None:
        pauses = delays(FIRST_RETRY_S, LAST_RETRY_S)
        while self._served:
            try:
                channel = await self._opened()
            except PortTakenError as error:
                log.error("VMs have no names: %s", error, extra={"code": "resolver_port"})
                if not self._decided.is_set():  # guests use the host's servers
                    self._served = False
                    self._decided.set()
                    return
                channel = None
            if channel is not None:
                pauses = delays(FIRST_RETRY_S, LAST_RETRY_S)
                await self._follow(channel, ask, tasks)
            if self._served:
                await asyncio.sleep(next(pauses))
        self._gone.set()

    async def _follow(self, channel: ResolverChannel, ask: Ask, tasks: Background) -> None:
        self._tell_all(channel)
        self._decided.set()
        try:
            while (message := await self._heard(channel)) is not None:
                self._take(channel, message, ask, tasks)
        finally:
            self._channel = None
            channel.close()
        if self._served:
            log.warning("the resolver ended; it is started again", extra={"code": "resolver_ended"})

    def _tell_all(self, channel: ResolverChannel) -> None:
        self._channel = channel
        for vm in self._vms.values():
            channel.send(vm_message(vm))
        if self._all_known.is_set():
            self.complete()

    async def _heard(self, channel: ResolverChannel) -> Message | None:
        """Return the next message; None after the end of the process. Kill a hung process."""
        for limit_s in (QUIET_S, HANG_S):
            try:
                async with asyncio.timeout(limit_s):
                    return await channel.receive()
            except TimeoutError:
                channel.send({"ping": True})
        await end_hung(self._site)
        return None

    def _take(
        self, channel: ResolverChannel, message: Message, ask: Ask, tasks: Background
    ) -> None:
        if "ask" in message:
            tasks.start(_answer(channel, message, ask))
        elif "log" in message:
            extra = {name: message[name] for name in ("code", "uid") if message[name]}
            log.log(message["level"], "%s", message["log"], extra=extra)

    async def _opened(self) -> ResolverChannel | None:
        """Return the channel to a process with this site; None if the caller must try again.

        A former process answers until the new process is ready and all VMs are known.

        Raises:
            PortTakenError: another server has the port.
        """
        former = await resolver_start.found(self._site)
        if former is not None:
            self._decided.set()
            if former.site == self._site.text():
                return former.channel
            former.channel.close()  # the former process continues without a netd
        channel = await resolver_start.launched(self._site)
        if channel is None:
            self._decided.set()
            return None
        try:
            if former is not None:
                await self._all_known.wait()
                await self.end()
            if await resolver_start.begun(channel, self._site):
                return channel
        except BaseException:
            channel.close()
            raise
        channel.close()
        return None


async def _answer(channel: ResolverChannel, message: Message, ask: Ask) -> None:
    want = Lookup(message["asker"], message["namespace"], message["vm"], message["address"])
    found: FoundName | None = None
    try:
        found, silent = await ask(want, message["uid"]), False
    except NobodyAnswersError:
        silent = True
    channel.send(answer_message(message["ask"], found, silent=silent))
