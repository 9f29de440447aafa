"""The built-in network with real frames: guest to host, guest to guest, guest to the outside."""

import asyncio
import contextlib
import os
import resource
import socket
import subprocess
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

import pytest
from services.netd.tests.pretended_host import Host, Node, eventually, ping_from_host

from virtbus.netd.core.names import host_link
from virtbus.netd.core.reach import ReachRules
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.node_rpc import NetPhase

pytestmark = pytest.mark.integration

A = "0192f0c1-2d3e-7abc-8def-00000000000a"
B = "0192f0c1-2d3e-7abc-8def-00000000000b"
C = "0192f0c1-2d3e-7abc-8def-00000000000c"
GATEWAY = IPv4Address("10.127.0.1")
OUTER = f"vbtest-world-{os.getpid()}"
"""The namespace of `world`, so that tests in several processes may have one each."""


@contextlib.contextmanager
def world(*more: IPv4Address) -> Iterator[None]:
    """A second namespace behind the host: 198.51.100.2, which has no route to the guests.

    It refuses connections to any port of its addresses, so each is answered.
    """
    commands = [
        f"ip netns add {OUTER}",
        f"ip link add wan0 type veth peer name eth0 netns {OUTER}",
        "ip addr add 198.51.100.1/24 dev wan0",
        "ip link set wan0 up",
        f"ip -n {OUTER} addr add 198.51.100.2/24 dev eth0",
        f"ip -n {OUTER} link set eth0 up",
        *(f"ip -n {OUTER} addr add {each}/24 dev eth0" for each in more),
    ]
    try:
        for command in commands:
            subprocess.run(command.split(), check=True)
        yield
    finally:
        subprocess.run(["ip", "link", "del", "wan0"], check=False)
        subprocess.run(["ip", "netns", "del", OUTER], check=False)


async def test_an_attached_guest_and_its_host_reach_each_other(node: Node) -> None:
    ready = await node.attach(A)
    assert ready.phase is NetPhase.READY
    (interface,) = ready.interfaces
    assert interface.addresses[0].endswith("/16")
    assert (interface.gateway, interface.mtu, interface.tap) == ("10.127.0.1", 1500, "tap0")
    async with node.guest(A) as guest:
        await guest.ping(GATEWAY)
        await ping_from_host(str(guest.ip))


async def test_two_guests_reach_each_other(node: Node) -> None:
    await node.attach(A)
    await node.attach(B)
    async with node.guest(A) as one, node.guest(B) as other:
        await one.ping(other.ip)
        await other.ping(one.ip)


async def test_a_guest_reaches_the_world_under_the_hosts_address(node: Node) -> None:
    with world():
        await node.attach(A)
        async with node.guest(A) as guest:
            await guest.ping(IPv4Address("198.51.100.2"), via=GATEWAY)


async def test_a_guest_with_two_interfaces_has_two_addresses(node: Node) -> None:
    ready = await node.attach(A, networks=("default", "default"))
    addresses = {interface.addresses[0] for interface in ready.interfaces}
    macs = {interface.mac for interface in ready.interfaces}
    assert len(addresses) == len(macs) == 2
    async with node.guest(A, 1) as guest:
        await guest.ping(GATEWAY)


async def test_no_port_and_no_address_of_the_own_host_is_open_to_a_guest(node: Node) -> None:
    await node.attach(A)
    with world(), listening("0.0.0.0", 22, 4222, 6443, 10250):
        async with node.guest(A) as guest:
            for address in (GATEWAY, IPv4Address("198.51.100.1")):
                for port in (22, 4222, 6443, 10250):
                    assert not await answers(guest, address, port)
            assert not await answers(guest, IPv4Address("169.254.169.254"), 80)


async def test_a_host_connects_to_its_guests_and_gets_their_answers(node: Node) -> None:
    await node.attach(A)
    async with node.guest(A) as guest:
        await ping_from_host(str(guest.ip))


async def test_no_address_of_another_host_is_open_to_a_guest_until_a_setting_opens_it(
    node: Node,
) -> None:
    await node.attach(A)
    addresses = [IPv4Address(f"198.51.100.{last}") for last in (2, 3, 4)]
    bridge = node.doors.bridge
    with world(*addresses[1:]):
        async with node.guest(A) as guest:
            for address in addresses:
                await guest.ping(address, via=GATEWAY)
            bridge.set_reach(ReachRules(hosts=frozenset(addresses)))
            for address in addresses:
                assert not await answers(guest, address, 22)
            bridge.set_reach(
                ReachRules(hosts=frozenset(addresses), opened=(IPv4Network("198.51.100.3/32"),))
            )
            assert [await answers(guest, each, 22) for each in addresses] == [False, True, False]
            bridge.set_reach(ReachRules(closed=(IPv4Network("198.51.100.0/30"),)))
            assert [await answers(guest, each, 22) for each in addresses] == [False, False, True]


async def test_a_name_server_is_open_at_its_port_wherever_it_is(node: Node) -> None:
    await node.attach(A)
    server = IPv4Address("198.51.100.2")
    node.doors.bridge.set_reach(ReachRules(hosts=frozenset({server}), dns=(server, GATEWAY)))
    with world(), listening("0.0.0.0", 53, 54):
        async with node.guest(A) as guest:
            assert await answers(guest, server, 53)
            assert not await answers(guest, server, 54)
            assert await answers(guest, GATEWAY, 53)
            assert not await answers(guest, GATEWAY, 54)


async def test_many_hosts_are_closed_in_one_table(node: Node) -> None:
    await node.attach(A)
    many = frozenset(IPv4Address("203.0.113.0") + number for number in range(5000))
    server = IPv4Address("198.51.100.2")
    with world():
        async with node.guest(A) as guest:
            node.doors.bridge.set_reach(ReachRules(hosts=many))
            assert await answers(guest, server, 22)
            node.doors.bridge.set_reach(ReachRules(hosts=many | {server}))
            assert not await answers(guest, server, 22)


@contextlib.contextmanager
def listening(address: str, *ports: int) -> Iterator[None]:
    """Listeners of the host on all its addresses."""
    with contextlib.ExitStack() as stack:
        for port in ports:
            listener = stack.enter_context(socket.socket())
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((address, port))
            listener.listen()
        yield


async def answers(guest: object, to: IPv4Address, port: int, via: IPv4Address = GATEWAY) -> bool:
    """Return True if anything answers a SYN to `to`, sent by the gateway `via`."""
    from services.netd.tests.pretended_host import Guest, checksum

    assert isinstance(guest, Guest)
    mac = await guest.resolve(via)
    header = (40000).to_bytes(2, "big") + port.to_bytes(2, "big") + bytes(8) + b"\x50\x02\xff\xff"
    pseudo = guest.ip.packed + to.packed + b"\0\6\0\x14"
    check = checksum(pseudo + header + bytes(4))
    guest.send(guest.ipv4(mac, to, 6, header + check.to_bytes(2, "big") + bytes(2)))
    wanted = port.to_bytes(2, "big")
    try:
        await guest.receive(lambda f: f[23] == 6 and f[34:36] == wanted, timeout_s=0.3)
    except TimeoutError:
        return False
    return True


async def test_a_repeated_attach_changes_nothing(node: Node) -> None:
    first = await node.attach(A)
    links = node.host.census()["links"]
    assert await node.attach(A) == first
    assert node.host.census()["links"] == links


async def test_the_address_is_kept_over_release_of_others_and_restart(node: Node) -> None:
    first = await node.attach(A)
    await node.attach(B)
    await node.restart()
    await node.attachments.release(B, 1)
    assert await node.attach(A) == first


async def test_the_address_survives_a_reboot_of_the_host(node: Node) -> None:
    first = await node.attach(A)
    node.stop()
    node.host.namespaces.remove(first.interfaces[0].netns)
    await node.start()
    assert await node.attach(A) == first


async def test_all_addresses_in_use_is_429_and_leaves_nothing(host: Host) -> None:
    node = Node(host, subnet="192.0.2.1/29")
    await node.start()
    for number in range(5):
        await node.attach(f"0192f0c1-2d3e-7abc-8def-0000000000{number:02x}")
    with pytest.raises(VirtbusError, match="in use on this node") as refused:
        await node.attach(A)
    assert refused.value.code == 429
    assert A not in node.attachments.resources()
    await node.end()


async def test_the_oldest_released_address_is_reused_first_also_after_a_restart(
    host: Host,
) -> None:
    node = Node(host, subnet="192.0.2.1/29")
    await node.start()
    vms = [f"0192f0c1-2d3e-7abc-8def-0000000000{number:02x}" for number in range(7)]
    had = [(await node.attach(uid)).interfaces[0].addresses[0] for uid in vms[:5]]
    for at in (3, 1, 4):
        await node.attachments.release(vms[at], 1)
    again = await node.attach(vms[1], epoch=2)
    assert again.interfaces[0].addresses[0] == had[1]  # as before
    await node.attachments.release(vms[1], 2)
    await node.restart()
    new = [(await node.attach(uid)).interfaces[0].addresses[0] for uid in vms[5:]]
    assert new == [had[3], had[4]]
    await node.end()


async def test_a_mac_of_another_vm_is_refused(node: Node) -> None:
    await node.attach(A, macs=("02:00:00:00:00:77",))
    with pytest.raises(VirtbusError, match="another VM on this node has the MAC") as refused:
        await node.attach(B, macs=("02:00:00:00:00:77",))
    assert refused.value.reason == "mac_in_use"
    (detail,) = refused.value.body.details
    assert detail.path == "spec.domain.devices.interfaces[0].mac_address"


async def test_an_older_epoch_is_refused(node: Node) -> None:
    await node.attach(A, epoch=3)
    with pytest.raises(VirtbusError, match="epoch 2"):
        await node.attach(A, epoch=2)
    with pytest.raises(VirtbusError, match="epoch 2"):
        await node.attachments.release(A, 2)


async def test_another_interface_is_made_when_no_guest_uses_the_old_ones(node: Node) -> None:
    await node.attach(A)
    async with node.guest(A):
        kept = await node.attach(A, networks=("default", "default"), generation=2)
        assert [str(one.plug) for one in kept.interfaces] == ["plugged", "waiting"]
        assert kept.generation == 2
    ready = await node.attach(A, networks=("default", "default"), generation=2)
    assert [str(one.plug) for one in ready.interfaces] == ["plugged", "plugged"]


async def test_a_foreign_link_with_our_name_is_not_adopted(node: Node) -> None:
    name = host_link(A, 0)
    subprocess.run(["ip", "link", "add", name, "type", "bridge"], check=True)
    subprocess.run(["ip", "link", "set", name, "alias", B], check=True)
    await node.attach(C)
    with pytest.raises(VirtbusError, match="belongs to") as refused:
        await node.attach(A)
    assert refused.value.reason == "link_taken"
    assert name in node.host.census()["links"]
    subprocess.run(["ip", "link", "del", name], check=True)


async def test_the_bridge_goes_with_the_last_vm_and_forwarding_is_as_before(host: Host) -> None:
    forwarding = Path("/proc/sys/net/ipv4/ip_forward")
    forwarding.write_text("0")
    node = Node(host)
    await node.start()
    await node.attach(A)
    await node.attach(B)
    assert forwarding.read_text().strip() == "1"
    await node.attachments.release(A, 1)
    await node.attachments.tidy()
    assert "virtbus0" in host.census()["links"]
    await node.attachments.release(B, 1)
    await node.attachments.tidy()
    assert "virtbus0" not in host.census()["links"]
    assert "virtbus" not in host.census()["tables"]
    assert forwarding.read_text().strip() == "0"
    await node.end()


async def test_taps_keep_working_when_the_bridge_is_rebuilt(node: Node) -> None:
    await node.attach(A)
    async with node.guest(A) as guest:
        subprocess.run(["ip", "link", "del", "virtbus0"], check=True)
        await node.attach(B)
        await guest.ping(GATEWAY)


async def test_a_subnet_of_the_host_is_refused(node: Node) -> None:
    subprocess.run(["ip", "link", "add", "lan0", "type", "bridge"], check=True)
    subprocess.run(["ip", "addr", "add", "10.127.3.4/24", "dev", "lan0"], check=True)
    try:
        with pytest.raises(VirtbusError, match="set another `subnet`"):
            await node.attach(A)
    finally:
        subprocess.run(["ip", "link", "del", "lan0"], check=True)


async def test_a_vm_without_interfaces_is_ready_without_a_network(node: Node) -> None:
    ready = await node.attach(A, networks=())
    assert (ready.phase, ready.interfaces) == (NetPhase.READY, ())
    assert node.host.census()["netns"] == []


async def test_fifty_cycles_leave_descriptors_namespaces_and_rules_flat(node: Node) -> None:
    await node.attach(B)
    before = node.host.census()
    for epoch in range(1, 51):
        await node.attach(A, epoch=epoch)
        await node.attachments.release(A, epoch)
    await eventually(lambda: node.host.census() == before)


async def test_twenty_vms_at_once_get_twenty_addresses(node: Node) -> None:
    uids = [f"0192f0c1-2d3e-7abc-8def-0000000001{number:02x}" for number in range(20)]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(node.attach(uid)) for uid in uids]
    assert len({task.result().interfaces[0].addresses for task in tasks}) == 20
    assert os.path.isdir("/proc/self")


async def test_running_out_of_descriptors_is_an_error_and_recovers(node: Node) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    hogs = []
    try:
        with contextlib.suppress(OSError):
            while True:
                hogs.append(os.open("/dev/null", os.O_RDONLY))
        os.close(hogs.pop())
        with pytest.raises(VirtbusError, match="Too many open files") as refused:
            await node.attach(A)
    finally:
        for hog in hogs:
            os.close(hog)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert refused.value.body.retry == "same_id"
    assert (await node.attach(A)).phase is NetPhase.READY
