"""Keeps the resolver's process: starts or adopts it, and tells it which VMs have names.

The process outlives netd, so guests resolve names while netd is away. A process of another version
or with other settings is replaced.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from ipaddress import IPv4Address, IPv4Interface

from virtbus.bus.runtime.backoff import delays
from virtbus.bus.runtime.tasks import Background, background, wait_for_event
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
from virtbus.netd.edge.resolver_launch import found_at, launch
from virtbus.netd.fleet_names import Ask

log = logging.getLogger(__name__)

ANSWER_S = 10.0
"""Time in which the process starts, or answers."""
FIRST_RETRY_S, LAST_RETRY_S = 0.5, 60.0


class NamesKeeper:
    """Serves each VM from `serve` to `stop`, within `running`; outside of it, does nothing."""

    def __init__(self, site: ResolverSite) -> None:
        """If the site's domain is empty, guests get no resolver."""
        self._site = site
        self._vms: dict[str, NamedVm] = {}
        self._complete = False
        self._served = False
        self._channel: ResolverChannel | None = None
        self._gone = asyncio.Event()
        """Set when a process has ended that nobody needs."""

    @property
    def domain(self) -> str:
        """Return the domain of VMs' names; empty if names are not served."""
        return self._site.domain if self._served else ""

    @property
    def addresses(self) -> tuple[IPv4Address, ...]:
        """Return the address at which guests ask; none if names are not served."""
        return (IPv4Interface(self._site.gateway).ip,) if self._served else ()

    @asynccontextmanager
    async def running(self, ask: Ask) -> AsyncIterator[None]:
        """Serve names if there is a domain, and if no other server has the port.

        At the end, the process stays with its VMs. Without any, it ends.
        """
        async with background() as tasks:
            channel = await self._opened()
            if channel is not None:
                self._served = True
                tasks.start(self._keep(channel, ask, tasks))
            try:
                yield
            finally:
                self._served = False
                if self._complete and not self._vms and self._channel is not None:
                    await self._part(self._channel)

    async def end(self) -> None:
        """End the process, for an uninstall."""
        if (found := await self._found()) is not None:
            await _ended(found[0])

    # --- VMs ------------------------------------------------------------------------------
    def serve(self, attachment: Attachment) -> None:
        """Give the VM its name, and answer queries from its addresses; repeatable."""
        if self._served:
            vm = self._vms[attachment.uid] = vm_of(attachment)
            self._send(vm_message(vm))

    def stop(self, uid: str) -> None:
        """Forget a VM."""
        self._vms.pop(uid, None)
        self._send({"remove": uid})

    def complete(self) -> None:
        """Note that all VMs of the host are known: the process forgets all others."""
        self._complete = True
        self._send({"only": list(self._vms)})

    def _send(self, message: Message) -> None:
        if self._channel is not None:
            self._channel.send(message)

    async def _part(self, channel: ResolverChannel) -> None:
        """End a process that no VM needs."""
        self._channel = None
        channel.send({"end": True})
        if not await wait_for_event(self._gone, ANSWER_S):
            log.warning("the resolver does not end", extra={"code": "resolver_stays"})

    # --- the process ----------------------------------------------------------------------
    async def _keep(self, channel: ResolverChannel, ask: Ask, tasks: Background) -> None:
        """Serve the process, and start it again whenever it ends."""
        while True:
            try:
                self._tell_all(channel)
                while (message := await channel.receive()) is not None:
                    self._take(channel, message, ask, tasks)
            finally:
                self._channel = None
                channel.close()
            if not self._served:
                self._gone.set()
                return
            log.warning("the resolver ended; it is started again", extra={"code": "resolver_ended"})
            channel = await self._again()

    async def _again(self) -> ResolverChannel:
        pauses = delays(FIRST_RETRY_S, LAST_RETRY_S)
        while True:
            await asyncio.sleep(next(pauses))
            if (channel := await self._opened()) is not None:
                return channel

    def _tell_all(self, channel: ResolverChannel) -> None:
        self._channel = channel
        for vm in self._vms.values():
            channel.send(vm_message(vm))
        if self._complete:
            self.complete()

    def _take(
        self, channel: ResolverChannel, message: Message, ask: Ask, tasks: Background
    ) -> None:
        if "ask" in message:
            tasks.start(_answer(channel, message, ask))
        elif "log" in message:
            extra = {name: message[name] for name in ("code", "uid") if message[name]}
            log.log(message["level"], "%s", message["log"], extra=extra)

    async def _found(self) -> tuple[ResolverChannel, str] | None:
        """Return the channel to a process that runs, and the text of its site."""
        channel = await found_at(self._site.socket)
        return await _greeted(channel) if channel is not None else None

    async def _opened(self) -> ResolverChannel | None:
        """Return the channel to a process with this site; None if there can be none."""
        found = await self._found()
        if not self._site.domain:
            if found is not None:
                await _ended(found[0])
            return None
        if found is not None and found[1] == self._site.text():
            return found[0]
        try:
            made = await _greeted(await launch(self._site.text()))
        except OSError as error:
            log.error("the resolver cannot be started: %s", error, extra={"code": "resolver_start"})
            return None
        if found is not None:  # it has the ports until the new one is ready
            await _ended(found[0])
        return await self._begun(made[0]) if made is not None else None

    async def _begun(self, channel: ResolverChannel) -> ResolverChannel | None:
        channel.send({"begin": True})
        message = await _next(channel)
        if message is None or message.get("begun"):
            log.error(
                "VMs have no names: port 53 of %s cannot be opened (%s); let the host's DNS server "
                "listen on its own addresses only, or empty the setting `zone`",
                self._site.gateway,
                message["begun"] if message is not None else "no answer",
                extra={"code": "resolver_port"},
            )
            channel.close()
            return None
        return channel


async def _next(channel: ResolverChannel) -> Message | None:
    try:
        async with asyncio.timeout(ANSWER_S):
            return await channel.receive()
    except TimeoutError:
        return None


async def _greeted(channel: ResolverChannel) -> tuple[ResolverChannel, str] | None:
    message = await _next(channel)
    if message is None or "hello" not in message:
        channel.close()
        return None
    return channel, str(message["hello"])


async def _ended(channel: ResolverChannel) -> None:
    """End a process; return once it has closed its ports."""
    channel.send({"end": True})
    while await _next(channel) is not None:
        pass
    channel.close()


async def _answer(channel: ResolverChannel, message: Message, ask: Ask) -> None:
    want = Lookup(message["asker"], message["namespace"], message["vm"], message["address"])
    found: FoundName | None = None
    try:
        found, silent = await ask(want, message["uid"]), False
    except NobodyAnswersError:
        silent = True
    channel.send(answer_message(message["ask"], found, silent=silent))
