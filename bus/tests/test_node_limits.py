"""A node's stolen credentials cannot prevent other nodes from storing (H7)."""

import asyncio

import pytest
from bus.tests.strangers import UID, stranger

from virtbus.bus.client.nats_bus import NatsBus
from virtbus.bus.provisioning import server
from virtbus.schemas import subjects

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]


async def test_no_node_can_take_the_id_of_a_fact_before_it_is_stored(
    nats: server.Server, controller: NatsBus
) -> None:
    """The ids of events are predictable, and one stream holds the events of all nodes."""
    fact, identity = f"virtbus.evt.n2.{UID}.vm.deleted", f"{UID}:1:1:0:0:vm.deleted"
    async with stranger(nats, "node-n1") as thief:
        forged = {"Nats-Msg-Id": identity}
        await thief.client.request(f"virtbus.evt.n1.{UID}.x", b"mine", headers=forged)
    controller.emit(fact, {"kind": "vm.deleted"}, message_id=identity)
    controller.emit(fact, {"kind": "vm.deleted"}, message_id=identity)  # the same step again
    async with asyncio.timeout(10):
        while not (stored := await controller.history(subjects.events(UID), after=1)):
            await asyncio.sleep(0.05)
    await asyncio.sleep(0.2)
    stored = await controller.history(subjects.events(UID), after=1)
    assert [one.subject for one in stored] == [fact]
