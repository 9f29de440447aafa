"""`python -m tests.load.objects`: what volumes and ended operations cost, per piece.

Each volume is a full copy of an image, so it has an operation of its own, which ends and is kept.
They are made in equal lots. The cost of the last lot, per piece, is compared with that of the
first one: what grows with the number of pieces is not flat.
"""

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.load.__main__ import say
from tests.load.meters import Reading, line
from tests.load.population import closed_loop
from tests.load.world import PREFIX, Shape, World, world

from virtbus.bus.client.nats_bus import NatsBus
from virtbus.bus.runtime.ids import uuid7
from virtbus.schemas.errors import Code, VirtbusError

NAMESPACES = 50
POLL_S = 2.0
SETTLE_S = 4.0
IDLE_S = 8.0
STREAMS = ("KV_vm", "KV_st", "KV_node", "KV_sec", "EVT")
FLAT = 1.5
"""A lot may cost so much more per piece than the first one, on a machine with other work."""
QUOTAS = {
    "VIRTBUS_VOLUMES_IN_ALL": "1000000",
    "VIRTBUS_OPERATIONS_IN_ALL": "1000000",
    "VIRTBUS_VOLUMES_PER_NAMESPACE": "1000000",
    "VIRTBUS_OPERATIONS_PER_NAMESPACE": "1000000",
}

Figures = dict[str, Any]


@dataclass(frozen=True)
class Held:
    """The contents of the bus at one moment."""

    records: Mapping[str, int]
    """Messages by stream."""
    bytes_: Mapping[str, int]
    consumers: int


async def held(world: World) -> Held:
    """Ask the server about its streams."""
    infos = {name: await world.admin.js_api(f"STREAM.INFO.{name}") for name in STREAMS}
    states = {name: info["state"] for name, info in infos.items()}
    return Held(
        {name: int(state["messages"]) for name, state in states.items()},
        {name: int(state["bytes"]) for name, state in states.items()},
        sum(int(state["consumer_count"]) for state in states.values()),
    )


async def lots(world: World, count: int, lots: int) -> list[Figures]:
    """Make `count` volumes in lots; return the cost of each lot per piece."""
    found = []
    each = count // lots
    for lot in range(lots):
        found.append(await _lot(world, range(lot * each, (lot + 1) * each)))
        say(f"{(lot + 1) * each} volumes: {found[-1]}")
    return found


async def _lot(world: World, numbers: range) -> Figures:
    before, on_bus, count = world.read(), await held(world), len(numbers)
    begun = time.monotonic()
    client = world.population.bus
    await closed_loop(
        (partial(_create, client, number, world.shape.nodes) for number in numbers),
        world.shape.in_flight,
    )
    accepted = time.monotonic()
    await _filled(world, numbers)
    ended = time.monotonic()
    await asyncio.sleep(SETTLE_S)
    after, there = world.read(), await held(world)
    return {
        "volumes": numbers.stop,
        "accepted_per_s": round(count / (accepted - begun), 1),
        "ended_per_s": round(count / (ended - begun), 1),
        "records_per_piece": _per_piece(on_bus.records, there.records, count),
        "bytes_per_piece": _per_piece(on_bus.bytes_, there.bytes_, count),
        "consumers": there.consumers,
        "cpu_ms_per_piece": after.since(before, count)["cpu_ms_per_vm"],
        "pss_kib_per_piece": _per_piece(before.pss_kib, after.pss_kib, count),
        **await _idle(world, after),
    }


def _per_piece(before: Mapping[str, int], after: Mapping[str, int], count: int) -> dict[str, float]:
    grown = {name: round((after[name] - before[name]) / count, 2) for name in after}
    return {name: value for name, value in grown.items() if value}


async def _idle(world: World, before: Reading) -> Figures:
    """Measure the cost without requests."""
    await asyncio.sleep(IDLE_S)
    after = world.read()
    took = after.at_s - before.at_s
    cores = {n: round((v - before.cpu_s[n]) / took, 3) for n, v in after.cpu_s.items()}
    sent = round((after.bus["in_msgs"] - before.bus["in_msgs"]) / took, 1)
    return {"idle_cores": cores, "idle_messages_per_s": sent}


async def _create(client: NatsBus, number: int, nodes: int) -> None:
    asked = {
        "name": f"v{number}",
        "namespace": _namespace(number),
        "uid": uuid7(),
        "node": f"{PREFIX}-{number % nodes:03d}",
        "spec": {"size": "1MiB", "source": {"image": "tiny", "full": True}},
    }
    await _answer(client, "volume.create", asked)


async def _answer(client: NatsBus, verb: str, asked: Figures) -> Figures:
    """Ask until a controller has time for it."""
    while True:
        try:
            answer: Figures = await client.request(f"virtbus.api.v1.{verb}", asked, timeout_s=30)
        except VirtbusError as error:
            if error.code != Code.UNAVAILABLE:
                raise
            await asyncio.sleep(1)  # a controller without a CPU refuses what it would do too late
        else:
            return answer


async def _filled(world: World, numbers: range) -> None:
    """Wait until the fleet has stored the end of each copy.

    Each volume is asked for by its name. A list of all volumes would cost more in each lot.
    """
    client = world.population.bus
    async with asyncio.timeout(world.shape.phase_s):
        await closed_loop(
            (partial(_bound, client, number) for number in numbers), world.shape.in_flight
        )


async def _bound(client: NatsBus, number: int) -> None:
    asked = {"name": f"v{number}", "namespace": _namespace(number)}
    while True:
        view = await _answer(client, "volume.get", asked)
        if view["state"] == "Bound":
            return
        assert view["state"] != "FillFailed", view
        await asyncio.sleep(POLL_S)


def _namespace(number: int) -> str:
    return f"ns{number % NAMESPACES}"


def verdicts(found: Sequence[Figures]) -> dict[str, bool]:
    """Compare the last lot with the first one."""
    first, last = found[0], found[-1]

    def flat(name: str, least: float) -> bool:
        """Return True if no part of a figure has grown; `least` is the noise of a small one."""
        return all(
            value <= FLAT * max(first[name].get(part, 0.0), least)
            for part, value in last[name].items()
        )

    return {
        "records per piece": flat("records_per_piece", 0.5),
        "bytes per piece": flat("bytes_per_piece", 100.0),
        "consumers": last["consumers"] == first["consumers"],
        "CPU per piece": flat("cpu_ms_per_piece", 1.0),
        "memory per piece": flat("pss_kib_per_piece", 2.0),
        "messages without requests": last["idle_messages_per_s"]
        <= FLAT * first["idle_messages_per_s"],
    }


async def run(shape: Shape, volumes: int, count: int) -> list[Figures]:
    """Make the volumes in a world of their own."""
    with patch.dict(os.environ, QUOTAS):
        return await _run(shape, volumes, count)


async def _run(shape: Shape, volumes: int, count: int) -> list[Figures]:
    async with world(shape) as here:
        say(f"{shape.nodes} nodes ready after {here.nodes_ready_s:.1f} s")
        found = await lots(here, volumes, count)
        for service in here.services:
            for complaint in service.complaints()[:10]:
                say(f"{service.name}: {complaint}")
        return found


def main() -> int:
    """Return 0 if every cost per piece is flat, 1 otherwise."""
    parser = argparse.ArgumentParser(prog="tests.load.objects", description=__doc__)
    parser.add_argument("--volumes", type=int, default=10_000)
    parser.add_argument("--lots", type=int, default=5)
    parser.add_argument("--nodes", type=int, default=20)
    parser.add_argument("--in-flight", type=int, default=64)
    parser.add_argument("--controllers", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    shape = Shape(
        vms=0,
        nodes=options.nodes,
        in_flight=options.in_flight,
        controllers=options.controllers,
    )
    found = asyncio.run(run(shape, options.volumes, options.lots))
    holds = verdicts(found)
    lines = [line("volumes and operations", nodes=shape.nodes, **one) for one in found]
    if options.json:
        options.json.write_text("\n".join(lines) + "\n")
    told = [f"{name}: {'flat' if held else 'GROWS'}" for name, held in holds.items()]
    sys.stdout.write("\n".join([*lines, *told, ""]))
    return 0 if all(holds.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
