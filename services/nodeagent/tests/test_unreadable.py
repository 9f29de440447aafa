"""An unreadable value ends no guest, starts none twice, and delays no other VM."""

import asyncio
import hashlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from services.nodeagent.tests.pretended_node import NODE, Node, eventually, in_state, record, uid

from virtbus.bus.client.ports import EntryKind
from virtbus.nodeagent.core.ports import DomainChange, Ending
from virtbus.schemas import bounds, subjects
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.model import SCHEMA_VERSION
from virtbus.schemas.node import Fence, NodeSpec
from virtbus.schemas.records import read_stored
from virtbus.schemas.vm import VmSecrets
from virtbus.schemas.vm_status import VmStatus
from virtbus.schemas.wire import encode, read

A = uid(1)
KEYS = {
    "record": subjects.vm_record(NODE, A),
    "record of another vm": subjects.vm_record(NODE, uid(7)),
    "join": subjects.join_nonce(NODE),
    "host": subjects.node_host(NODE),
    "hosts": subjects.node_hosts(NODE),
    "node_spec": subjects.node_spec(NODE),
    "secret": subjects.vm_secret(NODE, A),
    "status": subjects.vm_status(NODE, A),
    "images": subjects.node_images(NODE),
}
DAMAGES: dict[str, Callable[[str], bytes]] = {
    "garbage": lambda _key: b"\xc1\xff no msgpack",
    "empty": lambda _key: b"",
    "over-size": lambda key: encode({"a": "x" * bounds.bound_of(key).read_bytes}),
    "a list": lambda _key: b"\x93\x01\x02\x03",
    "wrong types": lambda _key: encode({"uid": 7, "node": [], "nonce": {}}),
    "newer": lambda _key: encode({"schema_version": 99, "uid": A, "node": NODE}),
}


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path, resync_s=0.05, orphan_grace_s=0.2)


def damage(node: Node, key: str, how: str) -> None:
    """Put bytes at a key that no program of ours would write."""
    node.server.shelf(key).apply(key, DAMAGES[how](key))


async def others_are_served(node: Node) -> None:
    await node.start_another()
    another = record(99, deleting=True)
    await node.put(another)
    await eventually(lambda: ("destroy", uid(99)) in node.domains.done)


def ends(node: Node) -> list[tuple[str, str]]:
    return [deed for deed in node.domains.done if deed[1] == A and deed[0] != "start"]


@pytest.mark.parametrize("kind", KEYS)
async def test_a_damaged_value_ends_no_guest_and_delays_no_other_vm(node: Node, kind: str) -> None:
    await node.join()
    await node.put(record())
    async with node.agent():
        await eventually(in_state(node, "Running"))
        for how in DAMAGES:
            damage(node, KEYS[kind], how)
            await asyncio.sleep(0.3)  # several comparisons later, longer than an orphan's grace
        await others_are_served(node)
        assert ends(node) == []
        assert node.domains.done.count(("start", A)) == 1


@pytest.mark.parametrize("how", DAMAGES)
async def test_the_agent_writes_a_damaged_status_again_without_a_change_of_the_vm(
    node: Node, how: str
) -> None:
    await node.join()
    await node.put(record())
    async with node.agent():
        await eventually(in_state(node, "Running"))
        damage(node, KEYS["status"], how)

        async def repaired() -> bool:
            entry = await node.bus.get(KEYS["status"])
            with suppress(VirtbusError):
                return entry is not None and read(VmStatus, entry.value).state == "Running"
            return False

        await eventually(repaired)
        last = await node.bus.get(KEYS["status"])
        await asyncio.sleep(0.3)  # several comparisons later
        assert await node.bus.get(KEYS["status"]) == last  # an intact status is not written again


@pytest.mark.parametrize("kind", [kind for kind in KEYS if kind != "join"])
async def test_a_restarted_agent_continues_despite_a_damaged_value(node: Node, kind: str) -> None:
    await node.join()
    await node.put(record())
    async with node.agent():
        await eventually(in_state(node, "Running"))
        await eventually(node.files.list)
    for how in DAMAGES:
        damage(node, KEYS[kind], how)
        async with node.agent() as agent:
            await eventually(lambda: A in agent.vms.actors)
            await asyncio.sleep(0.3)
            assert A in agent.vms.actors
            assert ends(node) == []
    async with node.agent():
        node.domains.end(A, Ending.CRASHED, DomainChange.CRASHED)
        await others_are_served(node)
        await eventually(lambda: node.domains.done.count(("start", A)) == 2)


async def test_a_guest_with_an_unreadable_record_is_no_orphan(
    node: Node,
) -> None:
    await node.join()
    await node.put(record())
    async with node.agent():
        await eventually(in_state(node, "Running"))
    damage(node, KEYS["record"], "garbage")
    (node.settings.state_dir / "vms" / A / "record").write_bytes(b"\xc1")
    async with node.agent():
        await asyncio.sleep(0.7)
        await others_are_served(node)
    assert ends(node) == []
    assert node.domains.there[A].active


async def test_the_purge_of_a_damaged_record_ends_its_guest_and_leaves_nothing(node: Node) -> None:
    await node.join()
    await node.put(record())
    async with node.agent():
        await eventually(in_state(node, "Running"))
        damage(node, KEYS["record"], "garbage")
        await node.bus.purge(KEYS["record"], marker_ttl_s=60)
        await eventually(lambda: A not in node.domains.there)

        async def no_status() -> bool:
            entry = await node.bus.get(KEYS["status"])
            return entry is None or entry.kind is EntryKind.PURGE

        await eventually(no_status)


async def test_a_damaged_join_record_holds_the_vms_of_a_restarted_agent(node: Node) -> None:
    """It cannot know which bus this is; running guests continue."""
    await node.join()
    await node.put(record())
    async with node.agent():
        await eventually(in_state(node, "Running"))
    damage(node, KEYS["join"], "garbage")
    async with node.agent():
        await asyncio.sleep(0.5)
        assert ends(node) == []
        await node.join()
        await others_are_served(node)


async def test_a_fence_holds_while_the_node_spec_is_unreadable(node: Node) -> None:
    """Another node runs its VMs: to treat the fence as lifted would start them twice."""
    await node.join()
    fence = Fence(by="operator", why="it burns", time_ns=1)
    await node.bus.put(KEYS["node_spec"], encode(NodeSpec(node=NODE, fenced=fence)))
    async with node.agent():
        await node.put(record())
        await eventually(node.liveness)
        await asyncio.sleep(0.3)
        damage(node, KEYS["node_spec"], "garbage")
        await asyncio.sleep(0.3)
        assert node.domains.done == []
    async with node.agent():
        await asyncio.sleep(0.5)
        assert node.domains.done == []
        await node.bus.put(KEYS["node_spec"], encode(NodeSpec(node=NODE)))
        await eventually(lambda: ("start", A) in node.domains.done)


async def test_secrets_of_the_largest_size_are_read(node: Node) -> None:
    """They were once written up to the reader's bound, and a byte of frame made them unreadable."""
    text = "x" * (bounds.SECRET.written_bytes - 200)
    held = {"uid": A, "files": {"app": {"data": {"a": text}}}}
    body = encode({"schema_version": SCHEMA_VERSION, **held})
    assert read_back(body).files["app"].contents == {"a": text.encode()}
    await node.join()
    await node.bus.put(KEYS["secret"], body)
    seeded = {"volumes": [{"name": "app", "files": {}}]}
    await node.put(record(spec=seeded, sec_digest=hashlib.sha256(body).hexdigest()))
    async with node.agent():
        await eventually(lambda: node.domains.done == [("start", A)])


def read_back(body: bytes) -> VmSecrets:
    return read_stored(VmSecrets, KEYS["secret"], body)
