"""A netd that starts while the bus is away serves the guests that this host has already."""

import asyncio
from contextlib import suppress
from ipaddress import IPv4Interface
from unittest.mock import AsyncMock

import pytest
from services.netd.tests.pretended_host import Host, Node, eventually
from services.netd.tests.segment import BRIDGE, SERVER, Segment, lease, wanted
from services.netd.tests.test_dhcp_server import answer_to, ask, reply
from services.netd.tests.test_network_objects import target
from services.netd.tests.test_network_path import world
from services.netd.tests.test_published import HOST, WEB, reached, serving
from services.netd.tests.test_service import settings_on

from virtbus.bus.runtime.tasks import background
from virtbus.netd.__main__ import host_ports
from virtbus.netd.core.dhcp import MessageType
from virtbus.netd.core.resolver_messages import Lookup, NobodyAnswersError
from virtbus.netd.host_networks import HostNetworks
from virtbus.netd.service import teardown
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.node_rpc import NetReady

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


async def test_a_guest_on_a_segment_keeps_its_connection_with_another_address(
    lan_node: Node, lan: Segment
) -> None:
    """Its taps let only the leased address pass. The new one is reported once the bus is there."""
    node, settings = lan_node, settings_on(lan_node.host)
    settings = settings.model_copy(update={"links_allowed": (BRIDGE,)})
    await node.attach(A, **target("bridge", link=BRIDGE))
    networks = HostNetworks(settings, host_ports(settings), lambda: "held life\n")
    told: asyncio.Queue[NetReady] = asyncio.Queue()
    async with node.guest(A) as guest:
        await lease(node, guest, lan)
        node.stop()
        async with asyncio.timeout(60), networks.running(), background() as tasks:
            await networks.until_recovered()
            server = tasks.start(lan.answer_dhcp(other := IPv4Interface("192.0.2.11/24")))
            guest.send(wanted(guest, other))
            guest.ip = other.ip
            await eventually(lambda: str(other) in addresses_of(networks))
            server.cancel()
            await guest.ping(SERVER)
            tasks.start(networks.segments.report(told.put))
            assert (await told.get()).interfaces[0].addresses == (str(other),)
    await node.restart()


def addresses_of(networks: HostNetworks) -> list[str]:
    return [each for nic in networks.attachments.nics() for each in nic.addresses]


async def test_leftovers_are_removed_and_closed_addresses_applied_without_the_bus(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_on(host)
    networks = HostNetworks(settings, host_ports(settings), lambda: "held life\n")
    applied = asyncio.Event()
    monkeypatch.setattr(networks.reach, "run", AsyncMock(side_effect=applied.set))
    async with asyncio.timeout(60), networks.running():
        await networks.until_recovered()
        await applied.wait()
        await eventually(lambda: not networks.attachments.untidy.is_set())
    await teardown(settings, host_ports(settings))


async def test_a_recovery_that_has_failed_is_awaited_by_nobody_for_ever(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed task cancels the context's body once, and Python 3.11 may lose that."""
    settings = settings_on(host)
    networks = HostNetworks(settings, host_ports(settings), lambda: "held life\n")
    monkeypatch.setattr(networks.attachments, "recover", AsyncMock(side_effect=OSError("broken")))
    seen: list[OSError] = []

    async def body() -> None:
        async with networks.running():
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()  # the lost cancel
            try:
                await networks.until_recovered()
            except OSError as error:
                seen.append(error)

    with pytest.raises(ExceptionGroup):
        async with asyncio.timeout(60):
            await body()
    assert str(seen[0]) == "broken"


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
