"""The VMs of a run as a client sees them: requested, accepted, running, gone."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from virtbus.bus.client.nats_bus import NatsBus
from virtbus.bus.errors import BusError
from virtbus.bus.runtime.ids import uuid7
from virtbus.schemas.errors import Code, VirtbusError

RENEW_S = 10.0
IDLE_S = 7.0
"""A watch sends a message every 5 s; a silent one has lost its controller."""
AGAIN_S = 0.1
PATIENCE_S = 60.0


@dataclass(slots=True)
class Vm:
    """Moments on the monotonic clock; 0.0: not yet."""

    uid: str
    asked_s: float = 0.0
    accepted_s: float = 0.0
    running_s: float = 0.0
    delete_asked_s: float = 0.0
    delete_accepted_s: float = 0.0
    gone_s: float = 0.0
    retries: int = 0
    told: str = ""
    """The last state reported by the watch."""

    @property
    def missing(self) -> str:
        """The requested state that the VM has not reached; empty: none."""
        if self.delete_asked_s:
            if not self.delete_accepted_s:
                return "its delete is not accepted"
            return "" if self.gone_s else "nobody reported that it is gone"
        if not self.accepted_s:
            return "its create is not accepted"
        return "" if self.running_s else "nobody reported that it runs"


class Population:
    """Creates and deletes VMs through the API, and follows them by one watch of the API."""

    def __init__(self, bus: NatsBus, memory: str = "64MiB") -> None:
        self.bus = bus
        self._memory = memory
        self.vms: dict[str, Vm] = {}
        self._changed = asyncio.Event()
        self.synced = asyncio.Event()
        self.lost: list[str] = []
        """The reason for the end of each watch."""
        self.running = 0
        self.gone = 0
        self.samples: list[tuple[float, int, int, int]] = []
        """Moment, accepted, running, gone: the data of the plot."""

    # --- watch ----------------------------------------------------------------------------
    async def follow(self) -> None:
        """Follow until cancelled; restart a watch that ended (its controller was killed)."""
        while True:
            try:
                await self._watch()
            except (BusError, VirtbusError) as error:
                self.lost.append(str(error))
                await asyncio.sleep(AGAIN_S)

    async def _watch(self) -> None:
        listed: set[str] = set()
        renewed_s, renew = time.monotonic(), ""
        async with self.bus.request_stream(
            "virtbus.api.v1.vm.watch", {}, idle_timeout_s=IDLE_S
        ) as replies:
            async for reply in replies:
                for view in reply.get("items") or ():
                    listed.add(view["uid"])
                    self._seen(view)
                if reply.get("synced"):
                    self._listed(listed)
                if reply.get("change"):
                    self._seen(reply["change"])
                if reply.get("gone"):
                    self._gone(reply["gone"])
                renew = reply.get("renew") or renew
                if renew and time.monotonic() - renewed_s > RENEW_S:
                    renewed_s = time.monotonic()
                    await self.bus.publish(renew, {})

    def _seen(self, view: dict[str, Any]) -> None:
        vm = self.vms.get(view["uid"])
        if vm is None:
            return
        vm.told = view.get("state", "")
        if not vm.running_s and vm.told == "Running":
            vm.running_s = time.monotonic()
            self.running += 1
            self._changed.set()

    def _gone(self, uid: str) -> None:
        vm = self.vms.get(uid)
        if vm is not None and vm.delete_asked_s and not vm.gone_s:
            vm.gone_s = time.monotonic()
            self.gone += 1
            self._changed.set()

    def _listed(self, listed: set[str]) -> None:
        """Handle a complete list: VMs that were being deleted and are not in it are gone."""
        self.synced.set()
        for uid, vm in self.vms.items():
            if vm.delete_accepted_s and uid not in listed:
                self._gone(uid)

    async def settled(self, vms: Iterable[Vm]) -> None:
        """Wait until all `vms` have their requested state."""
        left = list(vms)
        while left:
            if left[-1].missing:
                self._changed.clear()
                await self._changed.wait()
            else:
                left.pop()

    async def sample(self, each_s: float = 0.25) -> None:
        """Record counts over time; never returns by itself."""
        while True:
            accepted = sum(1 for vm in self.vms.values() if vm.accepted_s)
            self.samples.append((time.monotonic(), accepted, self.running, self.gone))
            await asyncio.sleep(each_s)

    # --- requests -------------------------------------------------------------------------
    async def create(self) -> Vm:
        """Request a VM until it is accepted, with one uid."""
        vm = Vm(uuid7())
        self.vms[vm.uid] = vm
        vm.asked_s = time.monotonic()
        request = {
            "uid": vm.uid,
            "name": f"l-{vm.uid[-12:]}",
            "image": "tiny",
            "memory": self._memory,
        }
        await self._ask("virtbus.api.v1.vm.create", request, vm)
        vm.accepted_s = time.monotonic()
        self._changed.set()
        return vm

    async def delete(self, vm: Vm) -> None:
        """Request its delete until that is accepted.

        404 to a repeat means: the first request succeeded and its answer was lost. Then the VM
        is gone, and a watch that began after its end will never report it.
        """
        vm.delete_asked_s, retries = time.monotonic(), vm.retries
        try:
            await self._ask("virtbus.api.v1.vm.delete", {"uid": vm.uid, "grace_s": 0}, vm)
        except VirtbusError as error:
            if error.code != Code.NOT_FOUND or vm.retries == retries:
                raise
            self._gone(vm.uid)
        vm.delete_accepted_s = time.monotonic()
        self._changed.set()

    async def _ask(self, subject: str, data: dict[str, Any], vm: Vm) -> None:
        give_up_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                await self.bus.request(subject, data, timeout_s=10)
            except (BusError, VirtbusError) as error:
                refused = isinstance(error, VirtbusError) and error.code < Code.EXHAUSTED
                if refused or time.monotonic() > give_up_s:
                    raise
                vm.retries += 1
                await asyncio.sleep(AGAIN_S)
            else:
                return


async def closed_loop(works: Iterable[Callable[[], Awaitable[object]]], in_flight: int) -> None:
    """Run all of `works`, at most `in_flight` at a time: the next begins when one ends."""
    queue = iter(works)

    async def worker() -> None:
        for work in queue:
            await work()

    async with asyncio.TaskGroup() as group:
        for _ in range(in_flight):
            group.create_task(worker())
