"""A netd that starts while the bus is away serves the guests that this host has already."""

import asyncio

import pytest
from services.netd.tests.pretended_host import Host, Node, eventually
from services.netd.tests.test_dhcp_server import answer_to, ask, reply
from services.netd.tests.test_network_path import world
from services.netd.tests.test_published import HOST, WEB, reached, serving
from services.netd.tests.test_service import settings_on

from virtbus.netd.__main__ import host_ports
from virtbus.netd.core.dhcp import MessageType
from virtbus.netd.core.resolver_messages import Lookup, NobodyAnswersError
from virtbus.netd.host_networks import HostNetworks
from virtbus.netd.service import teardown
from virtbus.schemas.errors import VirtbusError

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

A = "0192f0c1-2d3e-7abc-8def-00000000000a"


async def test_a_lease_is_renewed_once_the_agent_says_that_it_holds_the_node(host: Host) -> None:
    before, node, settings = host.census(), Node(host), settings_on(host)
    await node.start()
    with world():
        await node.attach(A, **WEB)
        word = "refused\nanother host holds it\n"
        networks = HostNetworks(settings, host_ports(settings), lambda: word)

        def is_needed() -> bool:
            return networks.needed

        async with node.guest(A) as guest:
            node.stop()
            async with networks.running():
                ask(guest, MessageType.DISCOVER)
                with pytest.raises(TimeoutError):
                    await reply(guest, 0.5)
                assert not is_needed()
                word = "held life\n"
                async with asyncio.timeout(60):
                    await networks.recovered.wait()
                assert is_needed()
                own = (50, guest.ip.packed)
                renewed = await answer_to(guest, MessageType.REQUEST, own)
                assert renewed[16:20] == guest.ip.packed
                async with serving(guest, 80):
                    assert await reached(HOST, 8080)
                with pytest.raises(NobodyAnswersError):
                    await networks._asked(Lookup("10.127.0.7", "default", "web", ""), A)
            async with serving(guest, 80):
                assert await reached(HOST, 8080)
    await teardown(settings, host_ports(settings))
    await eventually(lambda: host.census() == before)


async def test_a_host_that_another_netd_serves_ends_the_process(host: Host) -> None:
    node, settings = Node(host), settings_on(host)
    await node.start()
    networks = HostNetworks(settings, host_ports(settings), lambda: "held life\n")
    with pytest.raises(ExceptionGroup) as failed:
        async with asyncio.timeout(60), networks.running():
            await networks.recovered.wait()
    assert failed.group_contains(VirtbusError, match="another virtbus-netd works in")
    await node.end()
    await teardown(settings, host_ports(settings))
