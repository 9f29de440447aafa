"""A service survives every message to it, and every requester gets an answer (ADR 0028).

netd needs a host: see `services/netd/tests/test_hostile_messages.py`.
"""

import asyncio
from pathlib import Path

import pytest
from services.controller.tests.virtual import run, world
from services.imaged.tests.test_service import serving as serving_imaged
from services.nodeagent.tests.pretended_node import NODE, Node, eventually, in_state, record, uid
from tests.hostile import UID, attack, endpoints, heard, unheard

from virtbus.bus.client.codec import pack
from virtbus.bus.client.memory_bus import MemoryServer
from virtbus.schemas import subjects

pytestmark = pytest.mark.timeout(120)


def test_the_controller_survives_every_message() -> None:
    async def scenario() -> None:
        async with world(controllers=1, nodes=1) as made:
            assert not unheard(made.server, "api", "")
            answered = await attack(made.server)
            assert {subjects.bus_storage(), subjects.client_span()} <= set(answered)
            assert all(answered[one] for one in endpoints(made.server))
            assert (await made.vm("create", name="web", image="tiny", uid=UID)).name == "web"

    run(scenario)


async def test_an_agent_survives_every_message(tmp_path: Path) -> None:
    node = Node(tmp_path)
    await node.join()
    async with node.agent():
        await eventually(lambda: any(".rpc.agent." in one for one in heard(node.server)))
        assert not unheard(node.server, "rpc", "agent.")
        ready = subjects.ready_all(NODE).replace(">", UID)
        others = {ready, subjects.service_report_all(NODE).replace("*", UID)}
        await eventually(lambda: others <= set(heard(node.server)))  # tasks of their own
        for part in ("image", "net"):
            subject = subjects.ready(NODE, UID, part)
            for body in (
                b"\xc1",
                b"[]",
                pack({"data": {"uid": "x", "epoch": 1, "phase": "ready"}}),
            ):
                await node.bus._link.send(subject, body)
        await attack(node.server)
        await node.put(record())
        await eventually(in_state(node, "Running"))


async def test_imaged_survives_every_message(tmp_path: Path) -> None:
    server = MemoryServer()
    async with serving_imaged(tmp_path, server) as desk:
        assert not unheard(server, "rpc", "imaged.")
        await attack(server, heard_by=("rpc.imaged.", "$SRV."))
        assert (await desk.ask("inspect", {})) == {}


def test_core_messages_are_decoded_in_the_guards_of_the_bus_only() -> None:
    sources = [*Path("services").glob("*/src/**/*.py"), *Path("cli/src").glob("**/*.py")]
    assert len(sources) > 200
    assert [str(one) for one in sources if "open_envelope" in one.read_text()] == []


async def test_early_ready_events_are_kept_in_a_bounded_number(tmp_path: Path) -> None:
    node = Node(tmp_path)
    await node.join()
    async with node.agent() as agent:
        await eventually(lambda: any(".rpc.agent." in one for one in heard(node.server)))
        for number in range(1, 1500):
            for _ in range(8):
                part = {"uid": uid(number), "epoch": 1, "phase": "begun"}
                await node.bus.publish(subjects.ready(NODE, uid(number), "net"), part)
            await asyncio.sleep(0)
        last = {"uid": uid(1600), "epoch": 1, "phase": "begun"}
        await node.bus.publish(subjects.ready(NODE, uid(1600), "net"), last)
        await eventually(lambda: uid(1600) in agent.vms._early._parts)
        assert len(agent.vms._early._parts) == 1000
        assert len(agent.vms._early.take(uid(1499))) == 4
        assert not agent.vms._early.take(uid(1))
        await node.bus.publish(
            subjects.ready(NODE, uid(1500), "net"),
            {"uid": uid(1500), "epoch": 1, "phase": "begun"},
        )
        await eventually(lambda: uid(1500) in agent.vms._early._parts)
        await node.bus.purge(subjects.vm_record(NODE, uid(1500)))
        await eventually(lambda: len(agent.vms._early._parts) == 999)
        await node.bus.publish(
            subjects.ready(NODE, uid(1500), "net"),
            {"uid": uid(1500), "epoch": 1, "phase": "ready"},
        )
        await node.start_another()
        assert len(agent.vms._early._parts) == 999
