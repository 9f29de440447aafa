"""Published ports on a real kernel: who reaches them, who does not, and who holds them."""

import asyncio
import contextlib
import os
import struct
import subprocess
from collections.abc import AsyncIterator
from ipaddress import IPv4Address, IPv6Address
from typing import Any
from unittest.mock import MagicMock

import pytest
from services.netd.tests.pretended_host import Guest, Node, checksum
from services.netd.tests.segment import run
from services.netd.tests.test_cni import bridge, conflist, forget_rules, rules, without_bridge
from services.netd.tests.test_network_objects import OTHER, target
from services.netd.tests.test_network_path import OUTER, answers, listening, world

from virtbus.netd.core.names import netns
from virtbus.netd.core.published import Lead, listeners, taken_by
from virtbus.netd.core.redirected import guest_port, list_connections
from virtbus.netd.edge.netlink import NETLINK_NETFILTER, Netlink
from virtbus.netd.edge.published_ports import PublishedPorts
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.node_rpc import NetPhase
from virtbus.schemas.publish import PublishedPort

A = "0192f0c1-2d3e-7abc-8def-00000000000a"
B = "0192f0c1-2d3e-7abc-8def-00000000000b"
C = "0192f0c1-2d3e-7abc-8def-00000000000c"
HOST = "198.51.100.1"
GUEST, GUEST6 = IPv4Address("10.127.0.7"), IPv6Address("fd00:127::7")


def published(*ports: dict[str, Any]) -> dict[str, Any]:
    return {"nics": ({"publish": list(ports)},)}


WEB = published({"host_port": 8080, "guest_port": 80})


@contextlib.asynccontextmanager
async def serving(guest: Guest, port: int) -> AsyncIterator[list[bytes]]:
    """Answer each SYN to `port` of a guest; yield the source addresses."""
    seen: list[bytes] = []

    async def serve() -> None:
        while True:
            frame = await guest.receive(
                lambda f: (
                    f[12:14] == b"\x08\x00" and f[23] == 6 and f[36:38] == struct.pack(">H", port)
                ),
                timeout_s=60,
            )
            if frame[47] & 0x3F != 2:
                continue
            seen.append(frame[26:30])
            sequence = int.from_bytes(frame[38:42], "big") + 1
            header = (
                frame[36:38] + frame[34:36] + bytes(4) + struct.pack(">I", sequence & 2**32 - 1)
            )
            header += b"\x50\x12\xff\xff"
            pseudo = guest.ip.packed + frame[26:30] + b"\0\6\0\x14"
            check = checksum(pseudo + header + bytes(4))
            reply = header + struct.pack(">H", check) + bytes(2)
            guest.send(guest.ipv4(frame[6:12], IPv4Address(frame[26:30]), 6, reply))

    async with asyncio.TaskGroup() as group:
        task = group.create_task(serve())
        yield seen
        task.cancel()


def connects(address: str, port: int, *, netns: str = "") -> bool:
    """Return True if a TCP connection to the port is accepted."""
    code = f"import socket; socket.create_connection(('{address}', {port}), 0.7).close()"
    inside = ("ip", "netns", "exec", netns) if netns else ()
    done = subprocess.run(
        [*inside, "/usr/bin/python3", "-c", code], check=False, capture_output=True
    )
    return done.returncode == 0


async def reached(address: str, port: int, netns: str = OUTER) -> bool:
    return await asyncio.to_thread(connects, address, port, netns=netns)


@pytest.mark.integration
async def test_a_port_leads_to_the_guest_from_outside_and_from_the_host(node: Node) -> None:
    with world():
        ready = await node.attach(A, **WEB)
        assert ready.interfaces[0].published == ("0.0.0.0:8080->80/tcp",)
        async with node.guest(A) as guest, serving(guest, 80) as seen:
            assert await reached(HOST, 8080)
            assert seen[-1] == IPv4Address("198.51.100.2").packed
            assert await asyncio.to_thread(connects, HOST, 8080)
            assert not await reached(HOST, 8081)
            await node.restart()
            assert await reached(HOST, 8080)
            await node.attachments.compare()
            subprocess.run(["nft", "delete", "table", "inet", "virtbus_ports"], check=True)
            assert not await reached(HOST, 8080)
            await node.attachments.compare()
            assert await reached(HOST, 8080)
        await node.attachments.release(A, 1)
        assert "virtbus_ports" not in node.host.census()["tables"]


@pytest.mark.integration
async def test_a_published_port_opens_nothing_to_guests(node: Node) -> None:
    with world(), listening(HOST, 4222):
        await node.attach(A, **published({"host_port": 8080, "guest_port": 4222}))
        await node.attach(B)
        async with node.guest(B) as other:
            for port in (8080, 4222):
                assert not await answers(other, IPv4Address(HOST), port)
                assert not await answers(other, IPv4Address("10.127.0.1"), port)


@pytest.mark.integration
@pytest.mark.parametrize("kind", ["nat", "routed"])
async def test_a_port_leads_to_a_guest_of_a_network_object_and_no_other_port_does(
    node: Node, kind: str
) -> None:
    gateway = IPv4Address("10.200.0.1")
    with world():
        run(f"ip -n {OUTER} route add 10.200.0.0/24 via 198.51.100.1")
        await node.attach(A, **target(kind), **WEB)
        await node.attach(B, **target(kind))
        async with node.guest(A) as guest, serving(guest, 80) as seen, node.guest(B) as other:
            assert await reached(HOST, 8080)
            assert seen == [IPv4Address("198.51.100.2").packed]
            assert await asyncio.to_thread(connects, HOST, 8080)
            assert await reached(str(guest.ip), 80) == (kind == "routed")
            assert not await answers(other, IPv4Address(HOST), 8080, via=gateway)
            await node.restart()
            assert await reached(HOST, 8080)


@pytest.mark.integration
@pytest.mark.parametrize("published_on", ["default", "nat"])
async def test_a_guest_of_a_network_object_reaches_no_published_port(
    node: Node, published_on: str
) -> None:
    """A redirect would come before the rules that close the hosts to guests."""
    other = target("nat", OTHER, "red", subnet="10.201.0.0/24")
    with world():
        await node.attach(A, **WEB, **(target("nat") if published_on == "nat" else {}))
        await node.attach(B, **other)
        async with node.guest(A) as guest, serving(guest, 80) as seen, node.guest(B) as near:
            assert not await answers(near, IPv4Address(HOST), 8080, via=IPv4Address("10.201.0.1"))
            assert seen == []


@pytest.mark.integration
async def test_an_isolated_network_publishes_no_port(node: Node) -> None:
    with pytest.raises(VirtbusError, match="to whose guests no host forwards"):
        await node.attach(A, **target("isolated"), **WEB)


@pytest.mark.integration
async def test_a_port_of_one_address_is_not_on_another(node: Node) -> None:
    with world():
        subprocess.run(["ip", "addr", "add", "198.51.100.9/24", "dev", "wan0"], check=True)
        port = {"host_port": 80, "guest_port": 80, "host_address": HOST}
        await node.attach(A, **published(port))
        async with node.guest(A) as guest, serving(guest, 80):
            assert await reached(HOST, 80)
            assert not await reached("198.51.100.9", 80)
        with pytest.raises(VirtbusError) as refused:
            await node.attach(B, **published(port | {"host_address": "203.0.113.1"}))
        assert refused.value.reason == "address_missing"


@pytest.mark.integration
async def test_a_port_that_somebody_holds_is_refused_with_the_holder(node: Node) -> None:
    await node.attach(A, **WEB)
    with pytest.raises(VirtbusError, match=f"8080/tcp .* belongs to the VM default/vm-0192 .*{A}"):
        await node.attach(B, **WEB)
    udp = {"host_port": 8080, "guest_port": 80, "protocol": "udp"}
    await node.attach(B, **published(udp), generation=2)
    with listening("0.0.0.0", 8443), pytest.raises(VirtbusError, match=rf"\({os.getpid()}\)"):
        await node.attach(B, **published({"host_port": 8443, "guest_port": 1}), generation=3)
    assert B not in str(node.host.census()["netns"])
    await node.attachments.release(A, 1)
    assert (await node.attach(B, **WEB, generation=4)).interfaces[0].published


@pytest.mark.integration
async def test_a_changed_port_waits_for_the_guests_restart(node: Node) -> None:
    await node.attach(A, **WEB)
    other = published({"host_port": 9090, "guest_port": 80})
    async with node.guest(A):
        kept = await node.attach(A, **other, generation=2)
        assert kept.interfaces[0].published == ("0.0.0.0:8080->80/tcp",)
    ready = await node.attach(A, **other, generation=2)
    assert ready.interfaces[0].published == ("0.0.0.0:9090->80/tcp",)


@pytest.mark.integration
async def test_a_network_ends_although_somebody_has_flushed_all_rules(node: Node) -> None:
    await node.attach(A, **WEB)
    forget_rules()
    assert await node.attachments.release(A, 1)
    await node.attachments.tidy()
    assert "virtbus0" not in node.host.census()["links"]


@pytest.mark.integration
async def test_ports_of_a_network_that_ended_with_an_earlier_netd_lead_nowhere(node: Node) -> None:
    await node.attach(A, **WEB)
    node.stop()
    node.host.namespaces.remove(netns(A))
    node.doors.files.remove(A)
    await node.start()
    assert "virtbus_ports" not in node.host.census()["tables"]


@pytest.mark.integration
async def test_a_refused_table_of_ports_keeps_no_netd_from_its_start_and_is_written_later(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    await node.attach(A, **WEB)
    node.stop()
    node.host.namespaces.remove(netns(A))
    node.doors.files.remove(A)
    with monkeypatch.context() as patch:
        patch.setattr(PublishedPorts, "_apply", MagicMock(side_effect=OSError(22, "refused")))
        await node.start()
        await node.attachments.tidy()
        assert node.attachments.untidy.is_set()
    assert "virtbus_ports" in node.host.census()["tables"]
    await node.attachments.tidy()
    assert "virtbus_ports" not in node.host.census()["tables"]


@pytest.mark.integration
async def test_a_port_that_the_kernel_refuses_keeps_no_other_vm_from_its_ports(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    await node.attach(A, **WEB)
    await node.attach(B, **published({"host_port": 8081, "guest_port": 80}))
    node.stop()
    forget_rules()
    apply = PublishedPorts._apply

    def refusing(ports: PublishedPorts) -> None:
        if A in ports._leads:
            raise OSError(22, "refused")
        apply(ports)

    monkeypatch.setattr(PublishedPorts, "_apply", refusing)
    await node.start()
    ready = node.attachments.state_of(B)
    assert ready is not None
    assert ready.phase is NetPhase.READY  # A fails here, or with the table of all
    assert not node.doors.ports.is_missing(B)


@pytest.mark.integration
async def test_the_plugin_portmap_leads_a_port_to_the_guest_and_nobody_else_gets_it(
    node: Node,
) -> None:
    portmap = {"type": "portmap", "capabilities": {"portMappings": True}}
    conflist(node, "lan", bridge(node, ipMasq=True))
    with pytest.raises(VirtbusError, match="add portmap with the capability"):
        await node.attach(A, networks=("lan",), **WEB)
    assert node.host.census()["netns"] == []
    conflist(node, "lan", bridge(node, ipMasq=True), portmap)
    try:
        with world():
            ready = await node.attach(A, networks=("lan",), **WEB)
            assert ready.interfaces[0].published == ("0.0.0.0:8080->80/tcp",)
            async with node.guest(A) as guest, serving(guest, 80):
                assert await reached(HOST, 8080)
            for network in ("lan", "default"):
                with pytest.raises(VirtbusError, match="belongs to another VM's interface"):
                    await node.attach(B, networks=(network,), **WEB)
            assert "virtbus_ports" not in node.host.census()["tables"]
            await node.attachments.release(A, 1)
            assert "dport 8080" not in rules()
            assert not await reached(HOST, 8080)
    finally:
        without_bridge()
        forget_rules()


@pytest.mark.integration
@pytest.mark.parametrize("kind", ["default", "nat", "routed"])
async def test_nobody_reaches_a_published_port_by_a_gateway_of_guests(
    node: Node, kind: str
) -> None:
    """A guest on a segment, or of another host, may send packets there."""
    gateway = "10.127.0.1" if kind == "default" else "10.200.0.1"
    with world():
        run(f"ip -n {OUTER} route add {gateway} via 198.51.100.1")
        await node.attach(A, **WEB)
        if kind != "default":
            await node.attach(B, **target(kind))
        async with node.guest(A) as guest, serving(guest, 80) as seen:
            assert not await reached(gateway, 8080)
            assert seen == []
            assert await reached(HOST, 8080)
        port = {"host_port": 81, "guest_port": 80, "host_address": gateway}
        with pytest.raises(VirtbusError, match="a gateway of guests") as refused:
            await node.attach(C, **published(port))
        assert refused.value.reason == "address_missing"


@pytest.mark.integration
async def test_a_redirect_of_another_program_opens_no_guest_of_a_nat_network(node: Node) -> None:
    """As kube-proxy does for a Service whose endpoint its user has chosen."""
    with world():
        await node.attach(A, **target("nat"), **WEB)
        async with node.guest(A) as guest, serving(guest, 80) as seen:
            hook = "{ type nat hook prerouting priority -90; }"
            run("nft add table ip vbtest")
            try:
                subprocess.run(["nft", f"add chain ip vbtest pre {hook}"], check=True)
                run(f"nft add rule ip vbtest pre tcp dport 9090 dnat to {guest.ip}:80")
                assert not await reached(HOST, 9090)
                assert seen == []
                assert await reached(HOST, 8080)
            finally:
                run("nft delete table ip vbtest")


@pytest.mark.integration
@pytest.mark.parametrize("network", ["default", "lan"])
async def test_the_port_of_tunnels_is_published_on_no_host(node: Node, network: str) -> None:
    """A redirect would give the guest all frames of overlays, once the host has one."""
    conflist(node, "lan", bridge(node), {"type": "portmap", "capabilities": {"portMappings": True}})
    port = {"host_port": 14789, "guest_port": 14789}
    try:
        with pytest.raises(VirtbusError, match="for overlay networks") as refused:
            await node.attach(A, networks=(network,), **published(port | {"protocol": "udp"}))
        assert refused.value.reason == "port_reserved"
        if network == "default":
            assert (await node.attach(A, **published(port), generation=2)).interfaces[0].published
    finally:
        await node.attachments.release(A, 1)
        forget_rules()


def followed() -> set[int]:
    """Return the ports of guests to which known connections are redirected."""
    with Netlink(NETLINK_NETFILTER) as filters:
        found = filters.dump(list_connections())
    return {one.port for reply in found if (one := guest_port(reply)) is not None}


@pytest.mark.integration
async def test_connections_end_with_the_published_port_and_no_other_does(node: Node) -> None:
    """A client that sends UDP from one port would reach the next guest with this address."""
    udp = {"host_port": 5300, "guest_port": 53, "protocol": "udp"}
    send = "import socket; socket.socket(2, 2).sendto(b'x', ('198.51.100.1', {}))"
    with world():
        await node.attach(A, **published(udp))
        await node.attach(B, **published(udp | {"host_port": 5400, "guest_port": 54}))
        for port in (5300, 5400):
            inside = ["ip", "netns", "exec", OUTER, "/usr/bin/python3"]
            subprocess.run([*inside, "-c", send.format(port)], check=True)
        assert followed() == {53, 54}
        await node.attachments.release(A, 1)
        assert followed() == {54}


def line(local: str, state: str) -> str:
    return f" 0: {local} 00000000:0000 {state} 00000000:00000000 00:00000000 00000000 0 0 77 1 0 10"


SOCKETS = "\n".join(
    [
        "  sl  local_address …",
        line("0100007F:1F90", "0A"),
        line("016433C6:1F91", "0A"),
        line("00000000:1F92", "0A"),
        line("00000000:1F93", "01"),
        line("0" * 32 + ":1F94", "0A"),
        line("0" * 24 + "01000000:1F95", "0A"),
        line("B80D0120" + "0" * 16 + "01000000:1F96", "0A"),
        line("0" * 16 + "FFFF0000016433C6:1F97", "0A"),
        line("000080FE" + "0" * 16 + "01000000:1F98", "0A"),
    ]
)


def test_sockets_of_loopback_and_connections_hold_no_port() -> None:
    found = list(listeners("tcp", SOCKETS))
    assert [(str(one.address), one.port) for one in found] == [
        ("198.51.100.1", 0x1F91),
        ("0.0.0.0", 0x1F92),
        ("::", 0x1F94),
        ("2001:db8::1", 0x1F96),
        ("198.51.100.1", 0x1F97),
    ]
    assert found[0].inode == 77


@pytest.mark.parametrize(
    ("host_address", "host_port", "guest", "taken"),
    [
        ("198.51.100.9", 0x1F91, GUEST, False),
        (None, 0x1F91, GUEST, True),
        (None, 0x1F91, GUEST6, False),
        ("198.51.100.9", 0x1F92, GUEST, True),
        ("2001:db8::1", 0x1F92, GUEST6, False),
        ("198.51.100.9", 0x1F94, GUEST, True),
        ("2001:db8::1", 0x1F94, GUEST6, True),
        ("2001:db8::1", 0x1F96, GUEST6, True),
        ("2001:db8::2", 0x1F96, GUEST6, False),
        (None, 0x1F96, GUEST6, True),
        (None, 0x1F96, GUEST, False),
    ],
)
def test_a_socket_takes_packets_to_its_own_address_and_version(
    host_address: str | None, host_port: int, guest: IPv4Address | IPv6Address, taken: bool
) -> None:
    port = PublishedPort(host_port=host_port, guest_port=1, host_address=host_address)
    held = taken_by(Lead(port, guest, ""), listeners("tcp", SOCKETS))
    assert (held is not None) == taken


def test_the_same_port_of_two_addresses_is_two_ports() -> None:
    one = PublishedPort(host_port=80, guest_port=80, host_address="192.0.2.1")
    other = one.model_copy(update={"host_address": "192.0.2.2"})
    assert not one.clashes(other)
    assert one.clashes(other.model_copy(update={"host_address": None}))
    assert not one.clashes(one.model_copy(update={"protocol": "udp"}))
