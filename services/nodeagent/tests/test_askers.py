"""A bridge opens consoles, ports and guest agents only of its own VMs, on any node (M3)."""

from pathlib import Path

import pytest
from services.nodeagent.tests.pretended_node import NODE, Node, eventually, in_state, record, uid

from virtbus.bus.client.memory_bus import MemoryBus
from virtbus.bus.client.memory_link import MemoryLink
from virtbus.bus.errors import BusError
from virtbus.schemas import subjects
from virtbus.schemas.errors import VirtbusError

ASKS = {
    "console": {},
    "logs": {},
    "port": {"port": 22},
    "vnc": {},
    "screenshot": {},
    "guest": {},
    "counters": {},
}


@pytest.mark.parametrize("verb", ASKS)
async def test_a_bridge_opens_no_stream_of_another_owners_vm(tmp_path: Path, verb: str) -> None:
    made = Node(tmp_path)
    await made.join()
    async with made.agent():
        await made.put(record(1))
        await made.put(record(2, owner="bridge"))
        for number in (1, 2):
            await eventually(in_state(made, "Running", uid(number)))
        reasons = {}
        for account in ("BRIDGE", "BRIDGE-WEST", "CLIENT"):
            bus = MemoryBus(made.server, account, link=MemoryLink(made.server, account))
            for number in (1, 2):
                want = {"uid": uid(number)} | ASKS[verb]
                try:
                    await bus.request(subjects.rpc(NODE, "agent", verb), want, timeout_s=2)
                except VirtbusError as error:
                    reasons[account, number] = error.reason
                except BusError:  # it was opened, and is silent
                    reasons[account, number] = ""
        refused = {key for key, reason in reasons.items() if reason == "not_owner"}
        assert refused == {("BRIDGE", 1), ("BRIDGE-WEST", 1), ("BRIDGE-WEST", 2)}
