"""Interfaces on CNI networks that join and leave a running guest."""

from ipaddress import IPv4Address

import pytest
from services.netd.tests.pretended_host import Guest, Node
from services.netd.tests.test_cni import bridge, conflist, leases, plugin, without_bridge
from services.netd.tests.test_hotplug import GATEWAY, A, plugs, refused, step

from virtbus.netd.core.hotplug import of_name
from virtbus.netd.edge.taps import open_tap

pytestmark = pytest.mark.integration

LAN = ("default", "lan")


async def test_an_interface_on_a_cni_network_joins_and_leaves(node: Node) -> None:
    conflist(node, "lan", bridge(node, capabilities={"mac": True}))
    await node.attach(A)
    try:
        async with node.guest(A) as cold:
            for generation in (2, 4):
                waiting = await node.attach(A, networks=LAN, generation=generation)
                assert plugs(waiting) == {"net0": "plugged", "net1": "waiting"}
                assert waiting.interfaces[1].addresses == ()
                lent = await step(node, "lend")
                await node.restart()
                assert (await step(node, "lend")).tap == lent.tap
                assert len(leases(node)) == 1, "the plugins ran once"
                fd = open_tap(lent.tap)
                await step(node, "join")
                await node.restart()
                assert await node.attachments.compare() == []
                ready = await node.attach(A, networks=LAN, generation=generation)
                nic = ready.interfaces[1]
                assert (nic.gateway, nic.mtu, lent.mtu) == ("10.88.0.1", 1400, 1400)
                hot = Guest(fd, nic.mac, nic.addresses[0])
                await hot.ping(IPv4Address("10.88.0.1"))
                hot.close()
                await node.attach(A, generation=generation + 1)
                await step(node, "drop")
                await node.restart()
                assert leases(node) == []
                assert "eth1" not in node.inside(A, "ip link show")
            await cold.ping(GATEWAY)
        assert await node.attachments.release(A, 1)
    finally:
        without_bridge()


async def test_a_plugin_that_fails_is_undone_and_the_running_guest_keeps_its_network(
    node: Node,
) -> None:
    failing = '[ "$CNI_COMMAND" = DEL ] || { echo \'{"code": 7, "msg": "no room"}\'; exit 1; }'
    plugin(node, "fails", failing)
    conflist(node, "lan", {"type": "fails"})
    await node.attach(A)
    async with node.guest(A) as cold:
        await node.attach(A, networks=LAN, generation=2)
        for _attempt in range(2):
            assert await refused(node, "lend") == "cni_failed"
            await node.restart()
            assert await node.attachments.compare() == []
        (attachment,) = node.attachments.ready()
        nic = of_name(attachment, "net1")
        assert nic is not None
        assert nic.pending
        await node.attach(A, generation=3)
        await step(node, "drop")
        assert plugs(await node.attach(A, generation=3)) == {"net0": "plugged"}
        await cold.ping(GATEWAY)
