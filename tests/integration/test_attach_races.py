"""Two controllers attach one volume to several VMs at once: one VM gets it, in each round."""

import asyncio
import json
from collections import Counter
from pathlib import Path

import nats.aio.client
import pytest
from tests.integration.test_controllers import ask, stage, until

from virtbus.bus.client.nats_bus import NatsBus
from virtbus.bus.runtime.ids import uuid7
from virtbus.schemas.errors import VirtbusError

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(300)]

ROUNDS = 100
RIVALS = 6


async def attach(bus: NatsBus, volume: str, vm: str) -> bool:
    """Return True if the VM has got the volume, False if another VM has it."""
    try:
        await ask(bus, "attach", {"name": volume, "vm": vm}, of="volume")
    except VirtbusError as error:
        if (error.code, error.reason) != (409, "volume_in_use"):
            raise
        return False
    return True


async def served(creds: Path) -> list[int]:
    """Return the number of attach requests that each controller has answered."""
    login, client = json.loads(creds.read_text()), nats.aio.client.Client()
    await client.connect(login["url"], user=login["user"], password=login["password"])
    try:
        replies = await client.subscribe(inbox := client.new_inbox())
        await client.publish("$SRV.STATS.virtbus-controller", b"", reply=inbox)
        stats = [json.loads((await replies.next_msg(10)).data) for _ in range(2)]
    finally:
        await client.close()
    endpoints = [one for stat in stats for one in stat["endpoints"]]
    return [one["num_requests"] for one in endpoints if one["name"] == "volume-attach"]


async def test_one_vm_gets_a_volume_that_two_controllers_attach_at_once(tmp_path: Path) -> None:
    async with stage(tmp_path, controllers=2) as (fleet, processes, client):
        await until(processes.holders, "a controller holds the lease")
        vms = {uuid7(): f"vm{number}" for number in range(RIVALS)}
        async with asyncio.TaskGroup() as group:
            for uid, name in vms.items():
                group.create_task(
                    ask(client, "create", {"name": name, "uid": uid, "image": "tiny"})
                )
            for number in range(ROUNDS):
                asked = {"name": f"d{number}", "spec": {"size": "1MiB"}}
                group.create_task(ask(client, "create", asked, of="volume"))
        await until(lambda: vms.keys() <= fleet.placed.keys(), "all VMs have a node")
        winners = {}
        for number in range(ROUNDS):
            async with asyncio.TaskGroup() as group:
                tries = {
                    uid: group.create_task(attach(client, f"d{number}", name))
                    for uid, name in vms.items()
                }
            (winners[f"d{number}"],) = [uid for uid, task in tries.items() if task.result()]
            found = await ask(client, "get", {"name": f"d{number}"}, of="volume")
            assert found["holder"] == winners[f"d{number}"]

        def recorded() -> Counter[tuple[str, str]]:
            refs = [
                (ref.name, one.uid)
                for one in fleet.records.values()
                for ref in one.volume_refs.values()
            ]
            return Counter(refs)

        await until(lambda: recorded() == Counter(winners.items()), "each volume is in one record")
        counts = await served(tmp_path / "run" / "bus.creds")
        assert min(counts) > ROUNDS * RIVALS / 4, counts
