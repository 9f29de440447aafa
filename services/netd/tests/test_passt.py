"""The binding passt, with real processes and frames of a guest in user space."""

import asyncio
import os
import signal
import socket
import struct
import tempfile
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from ipaddress import IPv4Address, IPv6Address
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from services.netd.tests.ipv6_guest import Frames6
from services.netd.tests.pretended_host import (
    Guest,
    Host,
    Node,
    checksum,
    eventually,
    make_record,
    ping_from_host,
)
from services.netd.tests.segment import run
from services.netd.tests.test_hotplug import step
from services.netd.tests.test_network_objects import WORLD, A, B, cannot_ping, target
from services.netd.tests.test_network_path import world

from virtbus.bus.runtime.tasks import background
from virtbus.netd.core.attachment import Nic
from virtbus.netd.core.passt import cause, options, process_name
from virtbus.netd.core.plan import plan_of
from virtbus.netd.edge import passt_relay
from virtbus.netd.edge.qemu_processes import processes
from virtbus.netd.edge.taps import open_tap
from virtbus.netd.passt_watch import PasstWatch
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.node_rpc import NetPhase

GATEWAY = IPv4Address("10.127.0.1")
PORTS = [{"port": 7}, {"port": 8080}, {"port": 53, "protocol": "udp"}]
PASST: dict[str, Any] = {"nics": ({"binding": "passt", "ports": PORTS},)}


def running(uid: str, index: int = 0) -> dict[str, int]:
    """Return the processes of an interface by their programs; zombies have no arguments."""
    name = process_name(uid, index)
    return {words[0]: pid for pid, words in processes("cmdline") if name in words[:6]}


def kill(uid: str, *, relay: bool) -> None:
    (pid,) = [pid for word, pid in running(uid).items() if word.startswith("passt-") is not relay]
    os.kill(pid, signal.SIGKILL)


def tcp(guest: Guest, to: IPv4Address, ports: tuple[int, int], flags: int, ack: int = 0) -> bytes:
    head = struct.pack("!HHIIBBHHH", *ports, 1, ack, 5 << 4, flags, 64240, 0, 0)
    pseudo = guest.ip.packed + to.packed + struct.pack("!BBH", 0, 6, len(head))
    return head[:16] + struct.pack("!H", checksum(pseudo + head)) + head[18:]


def is_tcp(frame: bytes, source: IPv4Address, flags: int) -> bool:
    ip = frame[12:14] == b"\x08\x00" and frame[23] == 6 and frame[26:30] == source.packed
    return ip and frame[47] == flags


async def is_refused(address: object, port: int) -> bool:
    """Return True if nobody listens at the port."""
    try:
        async with asyncio.timeout(2):
            _reader, writer = await asyncio.open_connection(str(address), port)
    except ConnectionRefusedError:
        return True
    writer.close()
    return False


@asynccontextmanager
async def watched(node: Node) -> AsyncIterator[PasstWatch]:
    """netd's task that starts passt again."""
    watch = PasstWatch(node.doors.attachers.passt, node.attachments)
    watch.begin()
    async with background() as tasks:
        tasks.start(watch.run())
        yield watch


def planned(**nic: Any) -> Nic:
    found = plan_of(make_record(A, nics=({"binding": "passt", **nic},))).nics[0]
    return found.model_copy(update={"addresses": ("10.127.0.9/16",), "gateway": str(GATEWAY)})


def test_options_name_the_guests_address_and_its_ports() -> None:
    words = options(planned(ports=PORTS, publish=[{"host_port": 80, "guest_port": 81}]), A)
    given = dict(pairwise(words))
    assert (given["-a"], given["-n"], given["-g"]) == ("10.127.0.9", "16", "10.127.0.1")
    assert (given["-t"], given["-u"]) == ("7,81,8080", "53")
    assert {"-4", "--no-map-gw", "--no-dhcp", "--no-ra"} <= set(words)


def test_all_ports_are_forwarded_if_none_is_listed_and_none_of_a_protocol_without_any() -> None:
    every = options(planned(), A)
    assert [every[every.index(flag) + 1] for flag in ("-t", "-u")] == ["all", "all"]
    only = options(planned(ports=[{"port": 7}, {"port": 80, "last_port": 90}]), A)
    assert [only[only.index(flag) + 1] for flag in ("-t", "-u")] == ["7,80-90", "none"]


def test_ipv6_addresses_are_passts_too() -> None:
    nic = planned(ports=PORTS)
    nic = nic.model_copy(
        update={"addresses": (*nic.addresses, "fd00::9/64"), "gateway": "", "gateway6": ""}
    )
    words = options(nic, A)
    assert "-4" not in words
    assert [words[at + 1] for at, word in enumerate(words) if word == "-a"][1] == "fd00::9"
    assert [words[at + 1] for at, word in enumerate(words) if word == "-g"] == [
        "10.127.0.1",
        "fe80::1",
    ]


def test_the_relay_completes_the_handshake_for_servers_that_speak_first() -> None:
    def summed(address_bytes: int, frame: bytes, at: int) -> int:
        segment = frame[at:]
        ends = frame[at - 2 * address_bytes : at]
        return checksum(ends + struct.pack("!HH", 6, len(segment)) + segment)

    head = struct.pack("!HHIIBBHHH", 22, 4000, (1 << 32) - 1, 77, 0x50, 0x12, 9, 0, 0)
    macs = bytes(range(12))
    ip = bytes.fromhex("450000280000400040060000") + bytes([10, 0, 0, 1, 10, 0, 0, 2])
    four = passt_relay.acknowledgement(macs + b"\x08\0" + ip + head)
    assert four[:12] == macs[6:] + macs[:6]
    assert four[26:34] == ip[16:] + ip[12:16]
    assert struct.unpack("!HHIIBB", four[34:48]) == (4000, 22, 77, 0, 0x50, 0x10)
    assert checksum(four[14:34]) == summed(4, four, 34) == 0
    six_head = b"\x60\0\0\0\0\x14\x06\x40" + bytes(range(32))
    six = passt_relay.acknowledgement(macs + b"\x86\xdd" + six_head + head)
    assert six[22:54] == six_head[24:] + six_head[8:24]
    assert summed(16, six, 54) == 0
    plain = head[:13] + b"\x10" + head[14:]
    for other in (macs + b"\x08\0" + ip + plain, macs + b"\x08\x06" + ip + head, b"", macs):
        assert passt_relay.acknowledgement(other) == b""


def test_a_check_for_duplicates_does_not_reach_passt() -> None:
    guest = Frames6(bytes(6), IPv6Address("fd00:127::9"))
    assert passt_relay.has_no_source(guest.solicitation(guest.address, source=IPv6Address(0)))
    assert not passt_relay.has_no_source(guest.solicitation(guest.address))
    assert not passt_relay.has_no_source(bytes(60))


def test_the_cause_is_passts_last_line() -> None:
    said = "Failed to send 37 bytes to syslog\nL4 socket: Too many\nFailed to send 1 bytes\n"
    assert cause(said) == "L4 socket: Too many"
    assert cause("") == "it ended without a message"


@pytest.mark.parametrize("kind", ["bridge", "macvtap"])
def test_networks_that_give_the_address_themselves_are_refused(kind: str) -> None:
    with pytest.raises(VirtbusError) as refused:
        plan_of(make_record(A, **target(kind, link="lan0"), **PASST))
    (detail,) = refused.value.body.details
    assert detail.path == "spec.domain.devices.interfaces[0].binding"
    assert "passt serves" in detail.message


@pytest.mark.integration
async def test_a_host_without_passt_refuses_before_anything_is_made(node: Node) -> None:
    node.doors.attachers.passt._program = Path("/nonexistent/passt")
    assert node.doors.attachers.passt.bindings == ()
    with pytest.raises(VirtbusError, match="install Debian's package passt"):
        await node.attach(A, **PASST)
    assert node.host.namespaces.names() == []


@pytest.mark.integration
async def test_the_guest_reaches_the_world_by_sockets_and_is_reached_at_its_ports(
    node: Node,
) -> None:
    with world():
        ready = await node.attach(A, **PASST)
        await node.attach(B)
        assert ready.phase is NetPhase.READY
        async with node.guest(A) as guest, node.guest(B) as other:
            await guest.ping(GATEWAY)
            await guest.ping(WORLD, via=GATEWAY)
            await guest.ping(other.ip)
            await other.ping(guest.ip)
            await ping_from_host(str(guest.ip))
            assert await guest.resolve(GATEWAY) == await guest.resolve(other.ip)

            async with asyncio.timeout(5):
                _reader, writer = await asyncio.open_connection(str(guest.ip), 8080)
            syn = await guest.receive(lambda frame: is_tcp(frame, GATEWAY, 0x02))
            assert struct.unpack("!H", syn[36:38]) == (8080,)
            writer.close()
            assert await is_refused(guest.ip, 8081)
            assert await is_refused(guest.ip, 22)
        with pytest.raises(TimeoutError):  # no guest, no answer
            await ping_from_host(str(guest.ip), 0.5)


@pytest.mark.integration
async def test_passts_own_packets_obey_the_rules_of_the_network(node: Node) -> None:
    with world():
        await node.attach(A, **PASST)
        async with node.guest(A) as guest, asyncio.timeout(20):
            mac = await guest.resolve(GATEWAY)
            with socket.create_server((str(GATEWAY), 9099)) as host:
                host.setblocking(False)
                guest.send(guest.ipv4(mac, GATEWAY, 6, tcp(guest, GATEWAY, (4000, 9099), 0x02)))
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(1):
                        await asyncio.get_running_loop().sock_accept(host)
            spoofed = guest.ipv4(mac, WORLD, 1, b"\x08\0\xf7\xff\0\0\0\0", source=WORLD)
            guest.send(spoofed)
            await guest.ping(GATEWAY)
            assert node.counters(A).interfaces[0].refused == {"address": 1}
            await cannot_ping(guest, IPv4Address("169.254.169.254"), via=GATEWAY)


@pytest.mark.integration
async def test_both_processes_are_nobodys_and_in_a_namespace_of_their_own(node: Node) -> None:
    await node.attach(A, **PASST)
    found = running(A)
    assert len(found) == 2
    names = {os.readlink(f"/proc/{pid}/ns/net") for pid in found.values()}
    assert len(names) == 1
    assert names.isdisjoint({os.readlink("/proc/thread-self/ns/net")})
    for pid in found.values():
        status = Path(f"/proc/{pid}/status").read_text()
        assert "Uid:\t65534\t65534\t65534\t65534" in status
    (relay,) = [pid for word, pid in found.items() if not word.startswith("passt-")]
    assert "CapEff:\t0000000000000000" in Path(f"/proc/{relay}/status").read_text()


@pytest.mark.integration
@pytest.mark.parametrize("relay", [False, True])
async def test_passt_is_started_again_and_the_guest_keeps_its_device(
    node: Node, relay: bool
) -> None:
    async with watched(node) as watch:
        await node.attach(A, **PASST)
        async with node.guest(A) as guest:
            before = await guest.resolve(GATEWAY)
            former = set(running(A).values())
            kill(A, relay=relay)
            async with asyncio.timeout(10):
                finding = await watch._found.get()
            _reader, writer = await asyncio.open_connection(str(guest.ip), 7)
            syn = await guest.receive(lambda frame: is_tcp(frame, GATEWAY, 0x02))
            assert syn[:6] == guest.mac, "also if the guest has said nothing since"
            writer.close()
            assert "its passt has ended" in finding.message
            assert finding.reason == "network_mended"
            assert former.isdisjoint(running(A).values())
            assert await guest.resolve(GATEWAY) == before
            await guest.ping(GATEWAY)
            assert not await is_refused(guest.ip, 7)


@pytest.mark.integration
async def test_a_later_netd_finds_passt_and_follows_it(node: Node) -> None:
    await node.attach(A, **PASST)
    before = running(A)
    async with node.guest(A) as guest:
        node.stop()
        node.wire()
        async with watched(node) as watch:
            await node.attachments.recover()
            assert running(A) == before
            await guest.ping(GATEWAY)
            kill(A, relay=False)
            async with asyncio.timeout(10):
                await watch._found.get()
            await guest.ping(GATEWAY)
        kill(A, relay=True)
        await node.restart()  # it ended while no netd was there
        await guest.ping(GATEWAY)


@pytest.mark.integration
@pytest.mark.parametrize("left", ["relay", "passt"])
async def test_a_later_netd_starts_both_again_if_one_process_alone_is_left(
    node: Node, left: str
) -> None:
    await node.attach(A, **PASST)
    async with node.guest(A) as guest:
        node.stop()
        name = process_name(A, 0)
        before = running(A)
        (staying,) = (pid for first, pid in before.items() if (first == name) == (left == "passt"))
        os.kill(staying, signal.SIGSTOP)  # so that it does not notice the end of the other
        kill(A, relay=left == "passt")
        node.wire()
        await node.attachments.recover()
        assert len(running(A)) == 2
        assert not set(running(A).values()) & set(before.values())
        await guest.ping(GATEWAY)


@pytest.mark.integration
async def test_a_cable_that_somebody_cut_is_mended(node: Node) -> None:
    await node.attach(A, **PASST)
    async with node.guest(A) as guest:
        (nic,) = node.attachments.nics()
        run(f"ip link del {nic.host_link}")
        (finding,) = await node.attachments.compare()
        assert "by which passt of eth0 sends" in finding.message
        await guest.ping(GATEWAY)


@pytest.mark.integration
async def test_a_release_ends_the_processes_and_a_failed_start_leaves_none(node: Node) -> None:
    await node.attach(A, **PASST)
    await node.attachments.release(A, 1)
    await eventually(lambda: not running(A))
    node.doors.attachers.passt._program = Path("/bin/false")
    with pytest.raises(VirtbusError, match="it ended") as refused:
        await node.attach(B, **PASST)
    assert refused.value.body.reason == "passt_failed"
    await eventually(lambda: not running(B))


@pytest.mark.integration
async def test_passt_knows_the_guests_mac_before_it_serves(node: Node) -> None:
    """passt sends a connection that arrives earlier to 00:00:00:00:00:00."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "passt")
        program.write_text(  # `passt --fd FD …` that fails with the first frame of its stream
            '#!/bin/bash\ndd iflag=nonblock bs=4096 count=1 <&"$2" 2>/dev/null'
            " | od -An -v -w4096 -tx1 >&2; exit 1\n"
        )
        for path in (Path(folder), program):
            path.chmod(0o755)
        node.doors.attachers.passt._program = program
        with pytest.raises(VirtbusError) as refused:
            await node.attach(A, **PASST)
    mac = planned().mac.replace(":", " ")
    assert f"{mac} 08 06" in refused.value.body.message
    await eventually(lambda: not running(A))


@pytest.mark.integration
async def test_a_passt_that_cannot_be_ended_fails_the_release_and_nothing_else_stays(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stays(_uid: str, _indices: Collection[int]) -> None:
        raise VirtbusError(Code.INTERNAL, "passt_stays", "it cannot be ended")

    published = {"publish": [{"host_port": 8080, "guest_port": 80}]}
    await node.attach(A, nics=({**PASST["nics"][0], **published},))
    with monkeypatch.context() as patched:
        patched.setattr(node.doors.attachers.passt, "end", stays)
        with pytest.raises(VirtbusError, match="cannot be ended"):
            await node.attachments.release(A, 1)
    assert node.host.namespaces.names() == []
    assert "virtbus_ports" not in node.host.census()["tables"]
    await node.attachments.release(A, 1)
    await eventually(lambda: not running(A))


@pytest.mark.integration
async def test_an_interface_with_passt_is_plugged_into_a_running_guest_and_unplugged(
    node: Node,
) -> None:
    both: dict[str, Any] = {"networks": ("default", "default"), "nics": ({}, PASST["nics"][0])}
    await node.attach(A)
    async with node.guest(A):
        await node.attach(A, generation=2, **both)
        fd = open_tap((await step(node, "lend")).tap)
        await step(node, "join")
        ready = await node.attach(A, generation=2, **both)
        nic = ready.interfaces[1]
        assert len(running(A, 1)) == 2
        guest = Guest(fd, nic.mac, nic.addresses[0])
        await guest.ping(GATEWAY)
        await ping_from_host(str(guest.ip))
        guest.close()
        await node.attach(A, generation=3)
        await step(node, "drop")
        assert running(A, 1) == {}


@pytest.mark.integration
async def test_limits_and_the_link_state_are_as_elsewhere(node: Node) -> None:
    await node.attach(A, **PASST)
    async with node.guest(A) as guest:
        await guest.ping(GATEWAY)
        for state in ("down", "up"):
            nic = {
                **PASST["nics"][0],
                "state": state,
                "limits": {"outbound": {"bytes_per_s": 9999}},
            }
            await node.attach(A, generation=2, nics=(nic,))
            if state == "down":
                await cannot_ping(guest, GATEWAY)
        await guest.ping(GATEWAY)
        assert "tbf" in node.inside(A, "tc qdisc show dev eth0")


@pytest.mark.integration
async def test_passt_has_the_ipv6_addresses_of_the_guest(host: Host) -> None:
    before = host.census()
    node = Node(host, subnet6="fd00:127::1/64")
    await node.start()
    try:
        ready = await node.attach(A, **PASST)
        address = ready.interfaces[0].addresses[1].partition("/")[0]

        async with asyncio.timeout(10):  # a new address is tentative for a second
            while await is_refused(address, 8080):
                await asyncio.sleep(0.05)
        assert await is_refused(address, 8081)
    finally:
        await node.end()
    await host.returns_to(before)
