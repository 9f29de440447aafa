"""A write of a controller fails in a request for an operation: a repeat makes exactly one.

The write may be stored or not, and the controller may not learn which.
"""

import asyncio
from contextlib import suppress
from typing import Any

import pytest
from services.controller.tests.fleets import uid
from services.controller.tests.test_operation_api import off
from services.controller.tests.test_vm_api import played
from services.controller.tests.virtual import World

from virtbus.bus.client.memory_bus import Fault
from virtbus.bus.client.ports import Entry, EntryKind, WatchMark
from virtbus.bus.errors import BusError
from virtbus.schemas import subjects
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.operation import OperationPhase, OperationRecord, OperationStatus
from virtbus.schemas.records import read_operation
from virtbus.schemas.wire import encode

ID, FIRST = uid(90), uid(91)
WRITES = 3
"""A request makes at most so many; the leader writes meanwhile, too."""
REQUESTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "snapshot": ("snapshot", "create", {"name": "s", "vm": "web", "uid": ID}),
    "restore": ("snapshot", "restore", {"name": "first", "keep": "s", "keep_uid": ID}),
    "export": ("operation", "export", {"vm": "web", "id": ID}),
    "backup": ("backup", "create", {"vm": "web", "id": ID}),
}


async def operations(made: World) -> list[OperationRecord]:
    found = []
    async with made.host.watch("$KV.vm.*._op.*") as entries:
        async for item in entries:
            if item is WatchMark.SYNCED:
                break
            if isinstance(item, Entry) and item.kind is EntryKind.PUT:
                found.append(read_operation(item.key, item.value))
    return found


async def succeeds(made: World, id_: str) -> None:
    """End an operation as its node does."""
    one = OperationStatus(id=id_, node="n1", phase=OperationPhase.SUCCEEDED, ended_ns=1)
    await made.host.put(subjects.operation_status("n1", id_), encode(one))
    await asyncio.sleep(2)


@pytest.mark.parametrize("fault", list(Fault))
@pytest.mark.parametrize("kind", REQUESTS)
@pytest.mark.parametrize("at", range(WRITES))
def test_a_write_that_fails_is_repeated_and_makes_one_operation(
    kind: str, fault: Fault, at: int
) -> None:
    @played()
    async def scenario(made: World) -> None:
        await off(made)
        resource, verb, asked = REQUESTS[kind]
        if kind == "restore":
            await made.ask("create", "snapshot", name="first", vm="web", uid=FIRST)
            await succeeds(made, FIRST)
        faults: Any = made.buses["c1"].faults
        faults.extend([*[None] * at, fault])
        for _ in range(WRITES):
            with suppress(VirtbusError, BusError):
                await made.ask(verb, resource, **asked)
                break
            await asyncio.sleep(1)
        faults.clear()
        await made.ask(verb, resource, **asked)
        (one,) = [op for op in await operations(made) if op.id != FIRST]
        assert (one.id, one.kind) == (ID, kind)
        await succeeds(made, ID)
        if resource == "snapshot":
            found = await made.ask("get", "snapshot", name="s")
            assert (found["uid"], found["state"]) == (ID, "Ready")

    scenario()
