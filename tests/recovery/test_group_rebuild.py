"""A rebuild of the bus lists the security groups of hosts, and restores those that are accepted."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import pytest
from services.nodeagent.tests.pretended_node import NODE, Node
from tests.recovery.test_rebuild import ask, controller, node_says, rebuild

from virtbus.bus.client.memory_bus import MemoryBus, MemoryServer
from virtbus.bus.client.ports import Endpoint, Handler, Request, ServiceInfo
from virtbus.bus.errors import UnavailableError
from virtbus.controller.core.fleet import Fleet
from virtbus.controller.core.group_rebuild import accepted_copies, digest_of
from virtbus.controller.edge import group_rebuild
from virtbus.controller.edge.group_rebuild import GroupRebuild, RebuiltGroups
from virtbus.controller.edge.named_writes import NamedWrites
from virtbus.schemas import subjects
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.group_rebuild import GroupsRead, KnownGroups
from virtbus.schemas.node import NodeState
from virtbus.schemas.security_group import NodeGroup
from virtbus.schemas.wire import validate
from virtbus.simulator.services import Answer, SimulatedNode

SPEC = {
    "selector": {"labels": {"app": "web"}},
    "rules": [{"direction": "ingress", "protocol": "tcp", "ports": ["80"]}],
}


def group(name: str, number: int) -> NodeGroup:
    uid = f"0192f0c1-2d3e-7abc-8def-{number:012x}"
    about = {"uid": uid, "namespace": "default", "name": name, "generation": 3, "spec": SPEC}
    return validate(NodeGroup, about)


def page(want: GroupsRead) -> KnownGroups:
    """Return one group a page; the last one claims the key of another node."""
    held = {
        subjects.node_group(NODE, "default", "db"): group("db", 1),
        subjects.node_group(NODE, "default", "web"): group("web", 2),
        subjects.node_group("n9", "default", "open"): group("open", 3),
    }
    left = sorted(key for key in held if key > want.after)
    return KnownGroups(groups={left[0]: held[left[0]]}, more=len(left) > 1)


async def netd(request: Request) -> KnownGroups:
    return page(validate(GroupsRead, request.data))


class WithGroups(SimulatedNode):
    """A node whose netd holds groups."""

    def answers_of(self, service: str) -> Mapping[str, Answer]:
        found = super().answers_of(service)
        return {**found, "groups": (GroupsRead, page)} if service == "netd" else found


@asynccontextmanager
async def rebuilding(
    bus: MemoryBus, *hung: str
) -> AsyncIterator[Callable[..., Awaitable[RebuiltGroups]]]:
    """The groups' part alone, with netds on the node and the hung nodes, which do not answer.

    `within_s` is the whole time.
    """
    info = ServiceInfo("virtbus-netd", "1", "groups only", {})
    part, over = GroupRebuild(bus, Fleet(), MagicMock()), asyncio.Event()

    async def silent(_request: Request) -> KnownGroups:
        await over.wait()
        return KnownGroups()

    netds: dict[str, Handler] = {**dict.fromkeys(hung, silent), NODE: netd}

    async def call(*words: str, within_s: float = 5) -> RebuiltGroups:
        until_s = asyncio.get_running_loop().time() + within_s
        return await part.rebuild(list(netds), accepted_copies(words), until_s, dry=False)

    async with AsyncExitStack() as stack:
        for node, handler in netds.items():
            endpoint = Endpoint("groups", subjects.rpc(node, "netd", "groups"), handler)
            there = MemoryBus(bus.server, f"netd-{node}")
            await stack.enter_async_context(there.serve(info, [endpoint]))
        yield call
        over.set()  # a server waits a second for each request at its end


async def test_silent_hosts_cost_no_more_than_the_time_of_the_groups() -> None:
    hung = [f"h{number}" for number in range(24)]
    async with rebuilding(MemoryBus(MemoryServer()), *hung) as call:
        began_s = asyncio.get_running_loop().time()
        found = await call(within_s=1)
        assert asyncio.get_running_loop().time() - began_s < 3
    assert [one.name for one in found.groups] == ["db", "web"]
    assert "netd did not list all groups of h0, h1" in found.message
    assert "and 14 more" in found.message


async def test_a_fault_of_the_bus_is_a_message_and_accepted_groups_come_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(group_rebuild, "AT_ONCE", 1)
    bus = MemoryBus(MemoryServer())
    original = GroupRebuild._look_up

    async def failing(self: GroupRebuild, name: tuple[str, str], known: Any) -> None:
        if name[1] == "db":
            raise UnavailableError("no leader")
        await original(self, name, known)

    monkeypatch.setattr(GroupRebuild, "_look_up", failing)
    async with rebuilding(bus) as call:
        found = await call(f"{NODE}/default/web@{digest_of(group('web', 2))}")
    assert [(one.name, one.step) for one in found.groups] == [("web", "add")]
    assert found.message == "1 group(s) were not compared with the bus: no leader; repeat"


async def test_a_write_that_the_bus_refuses_is_a_conflict(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = AsyncMock(side_effect=UnavailableError("no leader"))
    monkeypatch.setattr(NamedWrites, "create", refused)
    async with rebuilding(MemoryBus(MemoryServer())) as call:
        found = await call(f"{NODE}/default/web@{digest_of(group('web', 2))}")
    assert ("conflict", "no leader; repeat") in [(one.step, one.message) for one in found.groups]


async def test_a_group_that_only_a_host_has_is_restored_after_a_persons_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(tmp_path)
    node.services = WithGroups
    await node.join()
    async with node.agent(), controller(node) as client:
        await node_says(node, NodeState.READY)
        found = (await rebuild(client)).groups
        assert [(one.name, one.step) for one in found] == [
            ("db", "unconfirmed"),
            ("web", "unconfirmed"),
        ]
        with pytest.raises(VirtbusError, match="must be NODE/NAMESPACE/NAME@DIGEST"):
            await ask(client, "bus.rebuild", accept_groups=[NODE])
        named = {"accept_groups": [f"{NODE}/default/web@{found[1].digest}"]}
        dry = (await rebuild(client, dry_run=True, **named)).groups
        assert [one.step for one in dry] == ["add", "unconfirmed"]
        assert not (await ask(client, "security-group.list")).get("items")
        done = (await rebuild(client, **named)).groups
        assert [one.step for one in done] == ["add", "unconfirmed"]
        (made,) = (await ask(client, "security-group.list"))["items"]
        assert (made["name"], made["uid"], made["generation"]) == ("web", group("web", 2).uid, 3)
        assert [one.name for one in (await rebuild(client, **named)).groups] == ["db"]
        monkeypatch.setattr(group_rebuild, "SHOWN_BYTES", 0)
        short = await rebuild(client, **named)
        assert (short.groups, short.groups_omitted) == ((), 1)
