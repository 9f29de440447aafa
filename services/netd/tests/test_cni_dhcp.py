"""Conflists with the plugin `dhcp`: the guest asks a real DHCP server on its network itself.

netd does not run that plugin for guests (ADR 0075). Its runtime for plugins can: Debian's daemon
gets a lease for a link that no guest has.
"""

import asyncio
import contextlib
import signal
import subprocess
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from ipaddress import IPv4Address, IPv4Interface
from pathlib import Path
from typing import Any

import pytest
from services.netd.tests.pretended_host import Guest, Node, eventually, make_record
from services.netd.tests.segment import (
    BRIDGE,
    BROADCAST,
    FIRST,
    HOST,
    OUTSIDE,
    SERVER,
    ping_from_outside,
    run,
)
from services.netd.tests.test_cni import A, B, conflist
from services.netd.tests.test_dhcp import request
from services.netd.tests.test_dhcp_server import reply

from virtbus.netd.core.cni_results import settled
from virtbus.netd.core.dhcp import MessageType, Option
from virtbus.netd.core.plan import plan_of
from virtbus.netd.core.reach import ReachRules
from virtbus.netd.edge.namespaces import in_thread

pytestmark = pytest.mark.integration

ON_BRIDGE = {"type": "bridge", "bridge": BRIDGE, "ipam": {"type": "dhcp"}}
ON_LINK = {"type": "macvlan", "master": BRIDGE, "ipam": {"type": "dhcp"}}
WITH_MAC = {"capabilities": {"mac": True}}
EVERY, NONE = IPv4Address("255.255.255.255"), IPv4Address(0)


@asynccontextmanager
async def server(node: Node) -> AsyncIterator[Process]:
    """BusyBox' DHCP server on the segment, with addresses from 192.0.2.10 to 192.0.2.20."""
    conf, leases = node.host.tmp / "udhcpd.conf", node.host.tmp / "udhcpd.leases"
    leases.touch()
    conf.write_text(
        f"start 192.0.2.10\nend 192.0.2.20\ninterface lan1\nlease_file {leases}\n"
        f"option subnet 255.255.255.0\noption router {SERVER}\noption lease 60\nmin_lease 1\n"
    )
    command = f"ip netns exec {OUTSIDE} busybox udhcpd -f {conf}"
    process = await asyncio.create_subprocess_exec(
        *command.split(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        process.terminate()
        await process.wait()


@asynccontextmanager
async def daemon(socket: Path) -> AsyncIterator[None]:
    """The daemon of Debian's plugin, which keeps the leases of containers."""
    command = f"/usr/lib/cni/dhcp daemon -socketpath {socket}"
    process = await asyncio.create_subprocess_exec(
        *command.split(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        await eventually(socket.exists)
        yield
    finally:
        process.terminate()
        await process.wait()


async def leases(node: Node, process: Process) -> list[str]:
    """Return the lines of the server's list of leases; it writes the file on a signal."""
    file = node.host.tmp / "udhcpd.leases"
    before = file.stat().st_mtime_ns
    process.send_signal(signal.SIGUSR1)
    await eventually(lambda: file.stat().st_mtime_ns != before)
    return run(f"busybox dumpleases -f {file}").splitlines()[1:]


async def lease(node: Node, guest: Guest) -> str:
    """Run the exchange of a DHCP client, and let netd apply the lease; return the address.

    The server looks for two seconds if somebody else has an address before it offers it.
    """

    async def answer(ask: MessageType, kind: MessageType, *options: tuple[int, bytes]) -> bytes:
        message = request(ask, *options, mac=guest.mac, flags=0x8000)
        for _attempt in range(4):
            guest.send(guest.udp(BROADCAST, EVERY, (68, 67), message, source=NONE))
            with contextlib.suppress(TimeoutError):
                while True:
                    found = await reply(guest, 4)
                    mine = found[28:34] == guest.mac  # broadcasts come to all
                    if mine and bytes((Option.MESSAGE_TYPE, 1, kind)) in found:
                        return found
        raise TimeoutError("no answer of the server")

    offer = await answer(MessageType.DISCOVER, MessageType.OFFER)
    chosen = (Option.SERVER_ID, SERVER.packed), (Option.REQUESTED_ADDRESS, offer[16:20])
    await answer(MessageType.REQUEST, MessageType.ACK, *chosen)
    await node.next_lease()
    guest.ip = IPv4Address(offer[16:20])
    return str(guest.ip)


@pytest.mark.parametrize(
    "main",
    [ON_BRIDGE, pytest.param(ON_LINK, marks=pytest.mark.long)],
    ids=["bridge", "macvlan"],
)
async def test_the_guest_gets_and_renews_its_address_at_the_server_of_the_network(
    lan_node: Node, main: dict[str, Any]
) -> None:
    conflist(lan_node, "lan", main | WITH_MAC, {"type": "tuning", "sysctl": {}})
    ready = await lan_node.attach(A, networks=("lan",))
    assert ready.interfaces[0].addresses == ()
    async with server(lan_node), lan_node.guest(A) as guest:
        first = await lease(lan_node, guest)
        state = lan_node.attachments.state_of(A)
        assert state is not None
        assert state.interfaces[0].addresses == (f"{first}/24",)
        await guest.ping(SERVER)
        assert await ping_from_outside(guest.ip)
        await lan_node.restart()
        await guest.ping(SERVER)
        assert await lease(lan_node, guest) == first
        assert lan_node.attachments.resources()[A][1:] == (f"address {first}/24",)
    assert await lan_node.attachments.release(A, 1)


@pytest.mark.long
async def test_two_guests_get_two_addresses_and_no_other_may_be_used(lan_node: Node) -> None:
    lan_node.reach = ReachRules(hosts=frozenset({HOST}))
    await lan_node.restart()
    conflist(lan_node, "lan", ON_BRIDGE | WITH_MAC)
    await lan_node.attach(A, networks=("lan",))
    await lan_node.attach(B, networks=("lan",))
    run(f"ip -n {OUTSIDE} addr add {HOST}/24 dev lan1")
    async with server(lan_node), lan_node.guest(A) as one, lan_node.guest(B) as other:
        assert await lease(lan_node, one) != await lease(lan_node, other)
        await one.ping(other.ip)
        with pytest.raises(TimeoutError):
            await one.ping(HOST)
        one.ip = IPv4Address("192.0.2.77")
        with pytest.raises(TimeoutError):
            await one.ping(SERVER)


@pytest.mark.long
async def test_the_real_plugin_leases_and_releases_an_address(lan_node: Node) -> None:
    lan_node.plugin_timeout_s = 10.0  # the server looks if somebody else has the address
    await lan_node.restart()
    socket, space = lan_node.host.tmp / "dhcp.sock", lan_node.host.namespaces
    ipam = {"type": "dhcp", "daemonSocketPath": str(socket)}
    conflist(lan_node, "lan", ON_LINK | WITH_MAC | {"ipam": ipam}, {"type": "tuning"})
    cni, nic = lan_node.doors.cni, plan_of(make_record(A, networks=("lan",))).nics[0]
    await in_thread(lambda: space.make_and_enter("vbtest-dhcp"))
    netns = space.path("vbtest-dhcp")
    try:
        async with server(lan_node) as served, daemon(socket):
            state = await cni.add(A, nic, cni.load("lan", "default"), netns)
            found = settled(nic, state.result or {})
            address = IPv4Interface(found.addresses[0])
            assert (address.ip in FIRST.network, found.gateway) == (True, str(SERVER))
            inside = run(f"nsenter --net={netns} ip -4 -o addr show dev eth0")
            assert str(address) in inside
            (line,) = await leases(lan_node, served)
            assert (nic.mac in line, str(address.ip) in line, "expired" in line) == (
                True,
                True,
                False,
            )
            await cni.delete(A, nic, state, netns)
            (line,) = await leases(lan_node, served)
            assert "expired" in line
    finally:
        space.remove("vbtest-dhcp")
