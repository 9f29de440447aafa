"""A crowd of VMs on one host, and the same domains by libvirt alone.

Both get all requests at once and return the duration: seconds from the first request until the
last guest runs, is stopped or is gone.
"""

import asyncio
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import libvirt
from tests.bench.rawvirt import RawVirt
from tests.bench.stage import IMAGE, Stage

from virtbus.bus.runtime.ids import uuid7
from virtbus.nodeagent.edge.hypervisor import RESERVED_WORKERS
from virtbus.nodeagent.edge.libvirt_limits import MAX_WORKERS
from virtbus.nodeagent.edge.libvirt_starts import SLOT_S

STARTS_AT_ONCE = 2 * (os.cpu_count() or 1)
MOST_STARTS = MAX_WORKERS - RESERVED_WORKERS
PHASE_S = 600.0
"""A phase that takes longer is stuck."""

Json = dict[str, Any]


class Crowd:
    """VMs of the product, each on the network that a VM has by default."""

    def __init__(self, stage: Stage, guests: int, memory_mib: int) -> None:
        self._stage = stage
        self.uids = [uuid7() for _ in range(guests)]
        self._memory = f"{memory_mib}MiB"

    async def create(self) -> float:
        self._stage.made.extend(self.uids)
        return await self._all("create", self._wanted, _state_is("Running"))

    async def start(self) -> float:
        return await self._all("start", lambda uid: {"uid": uid}, _state_is("Running"))

    async def stop(self) -> float:
        return await self._all("stop", _without_grace, _state_is("Stopped"))

    async def delete(self) -> float:
        took_s = await self._all("delete", _without_grace, lambda vm: bool(vm.get("gone")))
        self._stage.made[:] = [uid for uid in self._stage.made if uid not in self.uids]
        return took_s

    def _wanted(self, uid: str) -> Json:
        return {"uid": uid, "name": f"s{uid[-12:]}", "image": IMAGE, "memory": self._memory}

    async def _all(
        self, verb: str, request: Callable[[str], Json], done: Callable[[Json], bool]
    ) -> float:
        told = {self._stage.watch.expect(uid, done): uid for uid in self.uids}
        begun_s = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as group:
            for uid in self.uids:
                group.create_task(self._ask(verb, request(uid)))
        ended, missing = await asyncio.wait(told, timeout=PHASE_S)
        if missing:
            views = [await self._ask("get", {"uid": told[one]}) for one in list(missing)[:5]]
            lines = [f"{v['uid']} {v['state']}: {v.get('message')}" for v in views]
            msg = f"{verb}: {len(missing)} of {len(told)} not within {PHASE_S:g} s"
            raise AssertionError("\n".join([msg, *lines]))
        return max(one.result() for one in ended) - begun_s

    async def _ask(self, verb: str, data: Json) -> Json:
        answer: Json = await self._stage.bus.request(
            f"virtbus.api.v1.vm.{verb}", data, timeout_s=60
        )
        return answer


def _state_is(state: str) -> Callable[[Json], bool]:
    return lambda vm: vm.get("state") == state


def _without_grace(uid: str) -> Json:
    return {"uid": uid, "grace_s": 0}


class PlainCrowd:
    """As many domains like the product's own, defined, with their disks, by libvirt alone.

    The number of starts in flight is the agent's (ADR 0007): 2 x cores, not counting those that
    take over SLOT_S, of which a loaded host has many. So neither side has more of the host's
    CPU.
    """

    def __init__(self, domains: list[str]) -> None:
        self._domains = domains
        self._connections: SimpleQueue[libvirt.virConnect] = SimpleQueue()
        for _ in range(MOST_STARTS):  # a waiting call delays the others on its connection
            self._connections.put(libvirt.open("qemu:///system"))

    async def start(self) -> float:
        """Start each by one `create`."""
        slots = asyncio.Semaphore(STARTS_AT_ONCE)
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        with ThreadPoolExecutor(MOST_STARTS) as threads:

            async def one(uuid: str) -> float:
                async with slots:
                    call = loop.run_in_executor(threads, self._call, uuid, "create")
                    await asyncio.wait({call}, timeout=SLOT_S)
                await call
                return loop.time()

            async with asyncio.TaskGroup() as group:
                calls = [group.create_task(one(uuid)) for uuid in self._domains]
            return max(call.result() for call in calls) - begun_s

    async def stop(self) -> None:
        """End each by one `destroy`."""
        async with asyncio.TaskGroup() as group:
            for uuid in self._domains:
                group.create_task(asyncio.to_thread(self._call, uuid, "destroy"))

    def _call(self, uuid: str, verb: str) -> None:
        connection = self._connections.get()
        try:
            getattr(connection.lookupByUUIDString(uuid), verb)()
        finally:
            self._connections.put(connection)

    def close(self) -> None:
        for _ in range(MOST_STARTS):
            self._connections.get().close()


@contextmanager
def plain_crowd(raw: RawVirt, guests: int) -> Iterator[PlainCrowd]:
    """Domains of `raw`'s template; all are removed with the context."""
    domains: list[libvirt.virDomain] = []
    try:
        domains.extend(raw.connection.defineXML(raw.prepare()) for _ in range(guests))
        crowd = PlainCrowd([domain.UUIDString() for domain in domains])
        yield crowd
        crowd.close()
    finally:
        for domain in domains:
            if domain.isActive():
                domain.destroy()
            raw.forget(domain)
