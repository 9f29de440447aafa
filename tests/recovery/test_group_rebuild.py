"""A rebuild of the bus lists the security groups of hosts, and restores those that are accepted."""

from pathlib import Path

import pytest
from services.nodeagent.tests.pretended_node import NODE, Node
from tests.recovery.test_rebuild import ask, controller, node_says, rebuild

from virtbus.bus.client.memory_bus import MemoryBus
from virtbus.bus.client.ports import Endpoint, Request, ServiceInfo
from virtbus.controller.edge import group_rebuild
from virtbus.schemas import subjects
from virtbus.schemas.group_rebuild import GroupsRead, KnownGroups
from virtbus.schemas.node import NodeState
from virtbus.schemas.security_group import NodeGroup
from virtbus.schemas.wire import validate

SPEC = {
    "selector": {"labels": {"app": "web"}},
    "rules": [{"direction": "ingress", "protocol": "tcp", "ports": ["80"]}],
}


def group(name: str, number: int) -> NodeGroup:
    uid = f"0192f0c1-2d3e-7abc-8def-{number:012x}"
    about = {"uid": uid, "namespace": "default", "name": name, "generation": 3, "spec": SPEC}
    return validate(NodeGroup, about)


async def netd(request: Request) -> KnownGroups:
    """Answer with one group a page; the last one claims the key of another node."""
    after = validate(GroupsRead, request.data).after
    held = {
        subjects.node_group(NODE, "default", "db"): group("db", 1),
        subjects.node_group(NODE, "default", "web"): group("web", 2),
        subjects.node_group("n9", "default", "open"): group("open", 3),
    }
    left = sorted(key for key in held if key > after)
    return KnownGroups(groups={left[0]: held[left[0]]}, more=len(left) > 1)


async def test_a_group_that_only_a_host_has_is_restored_after_a_persons_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(tmp_path)
    await node.join()
    info = ServiceInfo("virtbus-netd", "1", "groups only", {})
    subject = subjects.rpc(NODE, "netd", "groups")
    serving = MemoryBus(node.server, "netd").serve(info, [Endpoint("groups", subject, netd)])
    async with node.agent(), controller(node) as client, serving:
        await node_says(node, NodeState.READY)
        found = (await rebuild(client)).groups
        assert [(one.name, one.step) for one in found] == [
            ("db", "unconfirmed"),
            ("web", "unconfirmed"),
        ]
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
