"""Time from a label to the nodes' groups, in round trips of the bus, over the fake bus."""

import asyncio
from typing import Any

from services.controller.tests.test_address_pools import agents
from services.controller.tests.test_overlay_peers import hosts, network
from services.controller.tests.test_security_groups import LB, SPEC, WEB, make, of, vm
from services.controller.tests.test_vm_api import played
from services.controller.tests.virtual import World

from virtbus.bus.client.memory_bus import MemoryBus
from virtbus.bus.runtime.tasks import background
from virtbus.controller.edge.group_keys import ROUND_S
from virtbus.schemas import subjects
from virtbus.schemas.records import read_node_group

TRIP_S = 0.5
STEP_S = 0.01
NODES = [f"n{number}" for number in range(1, 21)]


def slow(bus: MemoryBus) -> None:
    """Let each read and each write of a connection take a round trip."""

    def late(name: str) -> None:
        original = getattr(bus, name)

        async def call(*what: Any, **more: Any) -> Any:
            await asyncio.sleep(TRIP_S)
            return await original(*what, **more)

        setattr(bus, name, call)

    for name in ("get", "put", "batch", "purge"):
        late(name)


async def on_node(made: World, name: str) -> tuple[int, int]:
    """Return the generation of the group `web` on a node, and the number of its peers there."""
    entry = await made.host.get(subjects.node_group(name, "default", "web"))
    assert entry is not None
    there = read_node_group(entry.key, entry.value)
    return there.generation, sum(map(len, there.peers.get("lb", {}).values()))


async def trips(made: World, wanted: tuple[int, int], asked: Any) -> float:
    """Return the round trips from a request until each node has this state of the group."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    async with background() as tasks:
        tasks.start(asked)
        while {await on_node(made, one) for one in NODES} != {wanted}:
            assert loop.time() - began_s < 30
            await asyncio.sleep(STEP_S)
    return (loop.time() - began_s - ROUND_S - 2 * STEP_S) / TRIP_S


@played()
async def test_labels_and_rules_are_on_all_nodes_within_three_round_trips(made: World) -> None:
    await hosts(made, len(NODES))
    await network(made)
    await make(made)
    await make(made, "lb", 2, spec=LB)
    async with agents(made, nodes=len(NODES)):
        for first, labels in ((100, WEB), (300, {"app": "lb"})):
            for number in range(first, first + 2 * len(NODES)):
                await vm(made, number, labels=labels, network="mesh")
        await vm(made, 200, network="mesh")
        await asyncio.sleep(5)
        (found,) = {await on_node(made, one) for one in NODES}
        before = 2 * len(NODES)
        assert found == (1, before)
        slow(made.buses["c1"])
        for labels, count in (({"app": "lb"}, before + 1), ({}, before)):
            seen = await made.vm("get", name="vm-200")
            asked = made.ask("update", name="vm-200", revision=seen.revision, labels=labels)
            assert await trips(made, (1, count), asked) <= 3
        group = await of(made, "get")
        rules = [*SPEC["rules"], {"direction": "egress"}]
        asked = of(made, "update", spec={**SPEC, "rules": rules}, revision=group.revision)
        assert await trips(made, (2, before), asked) <= 3
