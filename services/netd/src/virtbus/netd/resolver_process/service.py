"""Resolves names for guests in a process that outlives netd.

netd sends the names of this host's VMs, and asks the controllers for names on other hosts. Without
netd, the process uses its last names and the controllers' last answers.
"""

import asyncio
import errno
import itertools
import logging
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from virtbus.bus.runtime.tasks import background, wait_for_event
from virtbus.netd.core.resolver_messages import (
    FoundName,
    Lookup,
    Message,
    NobodyAnswersError,
    ResolverSite,
    answer_of,
    vm_of_message,
)
from virtbus.netd.edge.resolver_channel import ResolverChannel, can_be_found, listening
from virtbus.netd.fleet_names import FleetNames
from virtbus.netd.resolver import Resolver

ASK_S = 3.0
"""The time limit for netd's answer. netd's own limits are shorter, so only a suspended netd is
late.
"""

LOOK_S = 5.0


class ResolverService(logging.Handler):
    """One run of the process. As a log handler, it sends log records to netd."""

    def __init__(self, site: ResolverSite) -> None:
        super().__init__(logging.INFO)
        self._site = site
        self._fleet = FleetNames(self._ask)
        self._resolver = Resolver(site, self._fleet)
        self._netd: ResolverChannel | None = None
        self._questions: dict[int, asyncio.Future[Message]] = {}
        self._numbers = itertools.count(1)
        self._over = asyncio.Event()

    async def run(self, netd: ResolverChannel) -> None:
        """Serve until netd requests the end, or until both netd and the last VM are gone.

        Also return if netd ends before it sends `begin`, if the ports or the socket cannot be
        opened, or within 5 s after a removal of the socket from its path.

        The process opens the ports at `begin`, because an earlier process may have them before.
        """
        netd.send({"hello": self._site.text()})
        if await netd.receive() is None:
            return
        path = Path(self._site.socket)
        async with AsyncExitStack() as served, background() as tasks:

            async def connected(later: ResolverChannel) -> None:
                later.send({"hello": self._site.text()})
                await asyncio.wait([tasks.start(self._follow(later))])

            try:
                await served.enter_async_context(self._resolver.running())
                await served.enter_async_context(listening(path, connected))
            except OSError as error:
                netd.send({"begun": str(error), "taken": error.errno == errno.EADDRINUSE})
                return
            logging.getLogger().addHandler(self)
            netd.send({"begun": "", "taken": False})
            tasks.start(self._follow(netd))
            while not await wait_for_event(self._over, LOOK_S):
                if not can_be_found(path):
                    return

    async def _follow(self, netd: ResolverChannel) -> None:
        """Obey a netd until it ends, or until a later netd connects."""
        if self._netd is not None:
            self._netd.close()
        self._netd = netd
        self._fleet.ask_again()
        try:
            while (message := await netd.receive()) is not None:
                if "ping" in message:
                    netd.send({"pong": True})
                else:
                    self._apply(message)
        finally:
            if self._netd is netd:
                self._left()

    def _left(self) -> None:
        """Continue without netd while VMs have names. Without VMs, end."""
        self._netd = None
        for waiting in self._questions.values():
            if not waiting.done():
                waiting.set_exception(NobodyAnswersError())
        if not self._resolver.vms:
            self._over.set()

    def _apply(self, message: Message) -> None:
        if "put" in message:
            self._resolver.put(vm_of_message(message))
        elif "remove" in message:
            self._resolver.remove(message["remove"])
        elif "only" in message:
            for uid in self._resolver.vms.difference(message["only"]):
                self._resolver.remove(uid)
        elif "end" in message:
            self._over.set()
        elif "answer" in message:
            waiting = self._questions.get(message["answer"])
            if waiting is not None and not waiting.done():
                waiting.set_result(message)

    async def _ask(self, want: Lookup, uid: str) -> FoundName | None:
        if self._netd is None:
            raise NobodyAnswersError
        number = next(self._numbers)
        waiting = self._questions[number] = asyncio.get_running_loop().create_future()
        question: dict[str, Any] = {"ask": number, "uid": uid, "asker": want.asker}
        question |= {"namespace": want.namespace, "vm": want.vm, "address": want.address}
        self._netd.send(question)
        try:
            async with asyncio.timeout(ASK_S):
                return answer_of(await waiting)
        except TimeoutError as error:
            raise NobodyAnswersError from error
        finally:
            del self._questions[number]

    def emit(self, record: logging.LogRecord) -> None:
        """While netd is away, records are lost."""
        if self._netd is not None:
            code, uid = getattr(record, "code", ""), getattr(record, "uid", "")
            text = self.format(record)
            self._netd.send({"log": text, "level": record.levelno, "code": code, "uid": uid})
