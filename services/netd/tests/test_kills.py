"""Kills netd at the steps of a hot-plug, of published ports and of a change of groups.

The next netd continues from the host. `make test` kills it at some steps, `make long` at each.
"""

import asyncio
import os
import re
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from ipaddress import IPv4Address
from typing import Any

import pytest
from services.netd.tests.pretended_host import Guest, Host, Node
from services.netd.tests.test_hotplug import TWO, plugs, step
from services.netd.tests.test_published import WEB
from services.netd.tests.test_recovery import STEPS, A, B, gone, killed_at

from virtbus.bus.client.ports import Entry, EntryKind
from virtbus.netd.core.names import lent_tap
from virtbus.netd.edge.groups_store import GroupsStore
from virtbus.netd.edge.taps import open_tap
from virtbus.netd.security_groups import SecurityGroups
from virtbus.schemas.node_rpc import NetReady
from virtbus.schemas.security_group import NodeGroup
from virtbus.schemas.subjects import node_group
from virtbus.schemas.wire import encode, validate

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

GATEWAY = IPv4Address("10.127.0.1")
EVERY = [37, pytest.param(1, marks=pytest.mark.long)]
"""The distances between two steps at which netd is killed."""
KEY = node_group("n1", "default", "web")


class Netd(Node):
    """A node with the groups that it stored, which it reads before it adopts a network."""

    async def start(self) -> None:
        self.wire()
        store = GroupsStore(self.state_dir / "netd" / "groups")
        self.security = SecurityGroups("n1", self.doors, self.attachments, store)
        await self.attachments.recover()


Work = Callable[[Netd], Awaitable[Any]]


async def by_new_netd(host: Host, work: Work) -> Any:
    """Let a netd that has just started do something, and stop it."""
    node = Netd(host)
    await node.start()
    try:
        return await work(node)
    finally:
        node.stop()


def survives(host: Host, every: int, work: Work, then: Work, again: Work) -> int:
    """Kill netd at some steps of `work`; `then` is done by the next netd; return the steps.

    `again` leads back to the state before, and is done after each kill.
    """
    at = 1
    while killed_at(at, lambda: by_new_netd(host, work), STEPS):
        asyncio.run(by_new_netd(host, then))
        asyncio.run(by_new_netd(host, again))
        at += every
    asyncio.run(by_new_netd(host, then))
    return at


class RunningGuest:
    """A guest with one interface, and the second one that it gets and loses.

    This process has the taps open, as QEMU does. Each change of the record has a new generation.
    """

    def __init__(self, host: Host) -> None:
        self._generation = 1
        self.address = ""
        self.hot = -1
        asyncio.run(by_new_netd(host, self._begin))

    async def _begin(self, node: Node) -> None:
        await node.attach(B)
        await node.attach(A)
        _, (self.cold,) = await node.attachments.take_taps(A, 5.0)

    async def lend(self, node: Node) -> None:
        await node.attach(A, networks=TWO, generation=self._generation + 1)
        await step(node, "lend")

    async def lent(self, node: Node) -> None:
        """Finish the step, and let QEMU open the tap."""
        await self.lend(node)
        if self.hot < 0:
            self.hot = open_tap(lent_tap(A, 1))

    async def join(self, node: Node) -> None:
        await node.attach(A, networks=TWO, generation=self._generation + 1)
        await step(node, "join")

    async def joined(self, node: Node) -> None:
        """Finish the step; the guest uses the interface, with the address that it always gets."""
        await self.join(node)
        ready = await node.attach(A, networks=TWO, generation=self._generation + 1)
        assert plugs(ready) == {"net0": "plugged", "net1": "plugged"}
        assert await node.attachments.compare() == []
        first, second = ready.interfaces
        (address,) = second.addresses
        assert self.address in {"", address}
        self.address = address
        other = node.attachments.state_of(B)
        assert other is not None
        assert len({*first.addresses, address, *other.interfaces[0].addresses}) == 3
        guest = Guest(os.dup(self.hot), second.mac, address)
        await guest.ping(GATEWAY)
        guest.close()

    async def release_device(self) -> None:
        os.close(self.hot)
        self.hot = -1

    async def drop(self, node: Node) -> None:
        await node.attach(A, generation=self._generation + 2)
        await step(node, "drop")

    async def dropped(self, node: Node) -> None:
        """Finish the step: nothing of the interface is left, and the other one works."""
        await self.drop(node)
        ready: NetReady = await node.attach(A, generation=self._generation + 2)
        assert plugs(ready) == {"net0": "plugged"}
        assert "tap1" not in node.inside(A, "ip link show")
        assert await node.attachments.compare() == []
        guest = Guest(os.dup(self.cold), ready.interfaces[0].mac, ready.interfaces[0].addresses[0])
        await guest.ping(GATEWAY)
        guest.close()
        self._generation += 2

    async def without(self, node: Node) -> None:
        """Take the interface away from the guest."""
        if self.hot >= 0:
            await self.release_device()
        await self.dropped(node)

    async def with_it(self, node: Node) -> None:
        """Give the interface to the guest, which then releases its device."""
        await self.lent(node)
        await self.joined(node)
        await self.release_device()


@contextmanager
def running_guest(host: Host) -> Iterator[RunningGuest]:
    before = host.census()
    guest = RunningGuest(host)
    yield guest
    os.close(guest.cold)
    asyncio.run(gone(host, census=before))


@pytest.mark.parametrize("every", EVERY)
def test_after_a_kill_in_a_lend_or_a_join_the_guest_gets_its_interface(
    host: Host, every: int
) -> None:
    with running_guest(host) as vm:

        async def lent_and_gone(node: Node) -> None:
            await vm.lent(node)
            await vm.joined(node)
            await vm.without(node)

        async def nothing(node: Netd) -> None:
            del node

        assert survives(host, every, vm.lend, lent_and_gone, nothing) > 5

        async def with_lent(node: Node) -> None:
            await vm.without(node)
            await vm.lent(node)

        asyncio.run(by_new_netd(host, vm.lent))
        assert survives(host, every, vm.join, vm.joined, with_lent) > 15
        asyncio.run(by_new_netd(host, vm.without))


@pytest.mark.parametrize("every", EVERY)
def test_after_a_kill_in_a_drop_nothing_of_the_interface_stays(host: Host, every: int) -> None:
    with running_guest(host) as vm:
        asyncio.run(by_new_netd(host, vm.with_it))
        assert survives(host, every, vm.drop, vm.dropped, vm.with_it) > 10


def ports() -> list[str]:
    """The lines of the host's rules that lead a port to a guest."""
    done = subprocess.run(["nft", "list", "ruleset"], capture_output=True, text=True, check=True)
    return [line.strip() for line in done.stdout.splitlines() if "dport 8080" in line]


@pytest.mark.parametrize("every", EVERY)
def test_after_a_kill_while_a_port_is_published_it_leads_to_its_guest_or_nowhere(
    host: Host, every: int
) -> None:
    before = host.census()

    async def publish(node: Node) -> None:
        await node.attach(A, **WEB)

    async def published(node: Node) -> None:
        ready = await node.attach(A, **WEB)
        address = ready.interfaces[0].addresses[0].partition("/")[0]
        assert len(ports()) == 2
        assert all(f"dnat ip to {address}:80" in line for line in ports())
        assert await node.attachments.compare() == []

    async def end(node: Node) -> None:
        await node.attachments.release(A, 1_000)

    async def ended(node: Node) -> None:
        await end(node)
        await node.attachments.tidy()
        assert ports() == []

    assert survives(host, every, publish, published, ended) > 20
    assert survives(host, every, end, ended, publish) > 5
    asyncio.run(gone(host, census=before))


def group(port: int) -> Entry:
    """The group of VMs with the label `app: web`, as the bus delivers it."""
    rule = {"direction": "ingress", "protocol": "tcp", "ports": [str(port)]}
    spec = {"selector": {"labels": {"app": "web"}}, "rules": [rule]}
    uid = "0192f0c1-2d3e-7abc-8def-0000000000f1"
    found = validate(
        NodeGroup, {"uid": uid, "namespace": "default", "name": "web", "spec": spec, "peers": {}}
    )
    return Entry(key=KEY, value=encode(found), revision=port, kind=EntryKind.PUT)


@pytest.mark.parametrize("every", EVERY)
def test_after_a_kill_in_a_change_of_a_group_its_old_or_its_new_rule_is_in_force(
    host: Host, every: int
) -> None:
    before = host.census()

    def change_to(port: int) -> Work:
        async def change(node: Netd) -> None:
            node.security.see(group(port))
            assert await node.security._stored()
            assert await node.security._apply()

        return change

    def allowed(node: Netd) -> list[str]:
        rules = node.inside(A, "nft list ruleset")
        return [str(int(port, 16)) for port in re.findall(r"proto-dst (0x[0-9a-f]+)", rules)]

    async def begin(node: Netd) -> None:
        await node.attach(A, labels={"app": "web"})
        await change_to(80)(node)

    async def changed(node: Netd) -> None:
        assert allowed(node) in (["80"], ["443"])
        await change_to(443)(node)
        assert allowed(node) == ["443"]
        assert await node.attachments.compare() == []

    asyncio.run(by_new_netd(host, begin))
    assert survives(host, every, change_to(443), changed, change_to(80)) > 5
    asyncio.run(gone(host, census=before))
