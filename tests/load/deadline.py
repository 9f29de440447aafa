"""Ends a phase in time, or reports the missing VMs and their state on the bus."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.load.population import Vm
from tests.load.world import World

from virtbus.bus.client.ports import Entry
from virtbus.bus.errors import BusError
from virtbus.schemas.wire import decode

SHOWN = 10
LEFT_OUT = frozenset({"spec", "spec_hash", "traceparent", "interfaces", "conditions"})
"""Fields of a record or a status that never explain a missing VM."""


class StuckError(AssertionError):
    """A phase did not end in time."""


@asynccontextmanager
async def in_time(world: World, phase: str) -> AsyncIterator[None]:
    """End the body after the shape's `phase_s`.

    Raises:
        StuckError: names the missing VMs.
    """
    limit = asyncio.timeout(world.shape.phase_s)
    try:
        async with limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        told = "\n".join(await missing(world))
        raise StuckError(f"{phase} took over {world.shape.phase_s:g} s:\n{told}") from None


async def missing(world: World) -> list[str]:
    """Return lines about VMs in a wrong state, watches that ended, and logs of services."""
    vms = [vm for vm in world.population.vms.values() if vm.missing]
    lines = [f"{len(vms)} of {len(world.population.vms)} VMs are waited for"]
    lines += [await _about(world, vm) for vm in vms[:SHOWN]]
    lines += [f"a watch ended: {why}" for why in world.population.lost[-SHOWN:]]
    for service in world.services:
        lines += [f"{service.name}: {complaint}" for complaint in service.complaints()[-SHOWN:]]
    return lines


async def _about(world: World, vm: Vm) -> str:
    asked_s = time.monotonic() - (vm.delete_asked_s or vm.asked_s)
    record, status = [await _stored(world, f"$KV.{kind}.*.{vm.uid}") for kind in ("vm", "st")]
    return (
        f"{vm.uid}: {vm.missing}, asked {asked_s:.1f} s ago, {vm.retries} retries, "
        f"told {vm.told or 'nothing'}\n  record {record}\n  status {status}"
    )


async def _stored(world: World, key: str) -> str:
    try:
        return _shown(await world.admin.get(key))
    except BusError as error:
        return f"not read: {error}"


def _shown(entry: Entry | None) -> str:
    if entry is None:
        return "none"
    data: Any = decode(entry.value) if entry.value else {}
    told = {name: value for name, value in data.items() if name not in LEFT_OUT}
    return f"{entry.key} at {entry.revision}: {entry.kind} {told}"
