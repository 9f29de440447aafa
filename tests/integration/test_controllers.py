"""Three controllers on a real bus: racing creates, strict and pending VMs, a stop and a kill.

No room is given away twice, no accepted VM is lost, and nothing is left behind.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from virtbus.bus.client.connection import connect
from virtbus.bus.client.nats_bus import NatsBus
from virtbus.bus.client.ports import (
    Endpoint,
    Entry,
    EntryKind,
    Handler,
    Request,
    ServiceInfo,
    WatchMark,
)
from virtbus.bus.errors import OutcomeUnknownError, UnavailableError
from virtbus.bus.provisioning import server, stream_setup
from virtbus.bus.runtime.ids import uuid7
from virtbus.bus.runtime.tasks import background
from virtbus.schemas import subjects
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.ids import UNPLACED
from virtbus.schemas.node import NodeRecord, NodeState
from virtbus.schemas.node_rpc import HeldResources, KnownRecords
from virtbus.schemas.states import VmState
from virtbus.schemas.version import VERSION
from virtbus.schemas.vm import VmRecord
from virtbus.schemas.vm_status import VmStatus
from virtbus.schemas.wire import decode, encode, validate

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

NODES = ("n1", "n2", "n3")
NAMES = 40
RIVALS = 3
CPUS = 8
GIB = 1024**3
HOLDS = b"holds the lease"


class Fleet:
    """Nodes that answer, and agents that release deleted VMs, on one admin connection."""

    def __init__(self, bus: NatsBus) -> None:
        self.bus = bus
        self.records: dict[str, VmRecord] = {}
        """Return the records by uid, as the bus has them."""
        self.sums: dict[str, dict[str, Any]] = {}
        self.placed: Counter[str] = Counter()
        self.problems: list[str] = []

    def endpoints(self) -> list[Endpoint]:
        """Return what controllers ask hosts before a VM gets a volume."""

        def records(node: str) -> Handler:
            async def handle(_request: Request) -> KnownRecords:
                there = [one for one in self.records.values() if one.node == node]
                there.sort(key=lambda one: one.uid)
                return KnownRecords(node=node, records=tuple(there))

            return handle

        async def volumes(_request: Request) -> HeldResources:
            return HeldResources()

        return [
            endpoint
            for node in NODES
            for endpoint in (
                Endpoint("records", subjects.rpc(node, "agent", "records"), records(node)),
                Endpoint("inspect", subjects.rpc(node, "imaged", "inspect"), volumes),
            )
        ]

    async def beat(self) -> None:
        while True:
            for name in NODES:
                record = NodeRecord(
                    node=name,
                    hostname=name,
                    instance=name,
                    state=NodeState.READY,
                    cpus=CPUS,
                    memory_bytes=16 * GIB,
                )
                with contextlib.suppress(UnavailableError, OutcomeUnknownError):
                    await self.bus.put(subjects.node_record(name), encode(record), ttl_s=15)
            await asyncio.sleep(2)

    async def follow(self) -> None:
        async with self.bus.watch("$KV.vm.>") as watch:
            async for item in watch:
                if not isinstance(item, WatchMark):
                    await self._take(item)

    async def _take(self, entry: Entry) -> None:
        tokens = entry.key.split(".")
        value = decode(entry.value) if entry.kind is EntryKind.PUT else {}
        if tokens[2] == "_reserved":
            self.sums[tokens[4]] = value
            if value.get("vcpus", 0) > CPUS:
                self.problems.append(f"{tokens[4]} is overcommitted: {value}")
        elif len(tokens) == 4 and entry.kind is EntryKind.PURGE:
            known = self.records.get(tokens[3])
            if known is not None and known.node == tokens[2]:
                del self.records[tokens[3]]
        elif "spec" in value and tokens[2] in {UNPLACED, *NODES}:
            await self._record(validate(VmRecord, value))

    async def _record(self, record: VmRecord) -> None:
        known = self.records.get(record.uid)
        if known is not None and record.epoch < known.epoch:
            self.problems.append(f"{record.name} went back to epoch {record.epoch}")
        self.records[record.uid] = record
        if record.node == UNPLACED:
            return
        if not record.deleting:
            self.placed[record.uid] += 1
            return
        gone = VmStatus(
            uid=record.uid,
            node=record.node,
            epoch=record.epoch,
            generation=record.generation,
            state=VmState.DELETING,
            released=True,
        )
        await self.bus.put(subjects.vm_status(record.node, record.uid), encode(gone))


class Controllers:
    """Some processes and what they log."""

    def __init__(self, files: server.ServerFiles, logs: Path, count: int) -> None:
        self._logs, self._count = logs, count
        environ = {
            **os.environ,
            "VIRTBUS_NODE": "ctl",
            "VIRTBUS_CREDS": str(files.creds("controller")),
            "VIRTBUS_SWEEP_INTERVAL_S": "2",
            "VIRTBUS_ORPHAN_GRACE_S": "3",
        }
        self.processes: list[subprocess.Popen[bytes]] = []
        for number in range(count):
            with (logs / f"c{number}.log").open("wb") as log:
                argv = [sys.executable, "-m", "virtbus.controller"]
                self.processes.append(subprocess.Popen(argv, env=environ, stdout=log, stderr=log))

    def holders(self) -> list[int]:
        """Every holder of the lease so far, by number."""
        return [n for n in range(self._count) if HOLDS in (self._logs / f"c{n}.log").read_bytes()]

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


@asynccontextmanager
async def stage(
    tmp_path: Path, controllers: int = 3
) -> AsyncIterator[tuple[Fleet, Controllers, NatsBus]]:
    files = server.ServerFiles(tmp_path / "state", tmp_path / "run")
    async with (
        server.running(files, nodes=NODES, port=-1) as running,
        connect(running.settings("admin"), name="admin") as admin,
        connect(running.settings("client"), name="client") as client,
    ):
        await stream_setup.ensure(admin)
        fleet, processes = Fleet(admin), Controllers(files, tmp_path, controllers)
        try:
            info = ServiceInfo("nodes", VERSION, "stand-ins")
            async with admin.serve(info, fleet.endpoints()), background() as tasks:
                tasks.start(fleet.beat())
                tasks.start(fleet.follow())
                yield fleet, processes, client
        finally:
            processes.end()


async def ask(bus: NatsBus, verb: str, data: dict[str, Any], of: str = "vm") -> Any:
    """Return the answer after any number of attempts: a repeat settles an unknown outcome."""
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(OutcomeUnknownError, UnavailableError):
                try:
                    return await bus.request(subjects.api(of, verb), data, timeout_s=5)
                except VirtbusError as error:
                    if error.body.retry == "never":
                        raise
            await asyncio.sleep(0.2)


async def create(bus: NatsBus, number: int, rival: int) -> str:
    """Return the uid if this create got the name; otherwise empty."""
    wanted: dict[str, Any] = {"name": f"v{number}", "uid": uuid7(), "image": "tiny", "cpus": 2}
    if number % 2:
        wanted["spec"] = {"placement": {"overcommit": "strict"}}
    wanted["labels"] = {"rival": str(rival)}
    if number % 5 == 0:
        wanted["user_data"] = "#cloud-config\n"
    try:
        await ask(bus, "create", wanted)
    except VirtbusError as error:
        if error.code != 409:
            raise
        return ""
    return str(wanted["uid"])


async def until(true: Any, what: str, limit_s: float = 60) -> None:
    try:
        async with asyncio.timeout(limit_s):
            while not true():
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise AssertionError(what) from None


async def test_nothing_is_given_twice_or_lost_if_a_controller_stops_or_dies(tmp_path: Path) -> None:
    async with stage(tmp_path) as (fleet, controllers, client):
        await until(lambda: controllers.holders(), "somebody holds the lease")
        (holder,) = controllers.holders()
        winners: dict[int, list[str]] = {}

        async def race(number: int) -> None:
            async with asyncio.TaskGroup() as group:
                made = [group.create_task(create(client, number, r)) for r in range(RIVALS)]
            winners[number] = [task.result() for task in made if task.result()]

        async with asyncio.TaskGroup() as group:
            for number in range(NAMES):
                group.create_task(race(number))
            await asyncio.sleep(0.5)
            controllers.processes[holder].send_signal(signal.SIGSTOP)
        assert all(len(uids) == 1 for uids in winners.values()), winners
        uids = {one for found in winners.values() for one in found}
        await until(lambda: uids <= set(fleet.records), "every accepted VM has its record")
        assert any(one.node == "_" for one in fleet.records.values()), "some wait for a node"

        async def delete(uid: str) -> None:
            """Wait until it is placed: while the holder is stopped, another one places it."""
            await until(lambda: fleet.placed[uid], f"{uid} is placed", 120)
            await ask(client, "delete", {"uid": uid, "grace_s": 0})

        async with asyncio.TaskGroup() as group:
            for uid in uids:
                group.create_task(delete(uid))
            await until(lambda: len(controllers.holders()) > 1, "another one takes over", 40)
            controllers.processes[holder].send_signal(signal.SIGCONT)
            second = next(n for n in controllers.holders() if n != holder)
            controllers.processes[second].kill()
        # a delete that the killed controller had begun is finished by the next sweep, a minute
        # later
        await until(lambda: not fleet.records, "nothing stays", 120)
        assert fleet.problems == []
        await until(lambda: not any(fleet.sums.values()), "nothing is reserved")
        await until_swept(fleet.bus)


async def until_swept(bus: NatsBus) -> None:
    """Check that no claim and no secret is left."""
    async with asyncio.timeout(60):
        while left := [*await standing(bus, "$KV.vm._name.>"), *await secrets(bus)]:
            assert left
            await asyncio.sleep(1)


async def secrets(bus: NatsBus) -> list[str]:
    """Return the keys of VMs' secrets; the controllers' own stay."""
    return [key for key in await standing(bus, "$KV.sec.>") if subjects.SIGNING not in key]


async def standing(bus: NatsBus, keys: str) -> list[str]:
    found: list[str] = []
    async with bus.watch(keys) as watch:
        async for item in watch:
            if item is WatchMark.SYNCED:
                return found
            if isinstance(item, Entry) and item.kind is EntryKind.PUT:
                found.append(item.key)
    return found
