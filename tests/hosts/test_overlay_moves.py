"""A guest of an overlay moves, is lost by a cut-off host, and loses its host's power.

Each time its address, name and published port are at its present host, and nowhere else. A guest of
another overlay on the same host captures all frames meanwhile, and sees none of them.
"""

import json
import re
import shlex
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from ipaddress import IPv4Address
from pathlib import Path

import pytest
from tests.e2e.platform import Json, until
from tests.hosts.box import BRIDGE
from tests.hosts.fleet import Fleet, Host, fleet
from tests.hosts.test_overlay import MARK, Guest, as_admin, by_port, capture, made_key, ssh

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(1200)]

PORT, PORT6 = "0.0.0.0:2222->22/tcp", "[::]:2222->22/tcp"
OUTSIDE6 = "fd00:200::ffff"
"""An IPv6 address outside, in the subnet of those that this test gives to the hosts."""
MOVED_S, DOWN_S = 120.0, 90.0
CONTROL = b"\x5a" * 32
"""Bytes of the pings that the captures have to see."""
_SNIFFER = r"""
#include <net/if.h>
#include <netpacket/packet.h>
#include <arpa/inet.h>
#include <stdio.h>
#include <sys/socket.h>
#include <unistd.h>
static unsigned char frames[4096][128];
static int sizes[4096];
int main(int argc, char **argv) {
    int fd = socket(AF_PACKET, SOCK_RAW, htons(3)), count = 0;
    struct sockaddr_ll at = {.sll_family = AF_PACKET, .sll_protocol = htons(3),
                             .sll_ifindex = if_nametoindex(argv[1])};
    struct packet_mreq all = {.mr_ifindex = at.sll_ifindex, .mr_type = PACKET_MR_PROMISC};
    struct timeval brief = {.tv_usec = 100000};
    setsockopt(fd, SOL_PACKET, PACKET_ADD_MEMBERSHIP, &all, sizeof all);
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &brief, sizeof brief);
    if (bind(fd, (struct sockaddr *)&at, sizeof at)) return 2;
    fclose(fopen("/tmp/began", "w"));
    while (access("/tmp/end", F_OK) && count < 4096)
        if ((sizes[count] = recv(fd, frames[count], sizeof frames[count], 0)) > 0) count++;
    for (int i = 0; i < count; i++, puts(""))
        for (int j = 0; j < sizes[i]; j++) printf("%02x", frames[i][j]);
    return argc != 2;
}
"""
"""Captures each frame on a link in promiscuous mode, and prints all once /tmp/end exists: LINK."""


@dataclass
class Mesh:
    """The guests: `web` moves. `left` of n1 and `peer` of n2 are in its overlay, `third` is not."""

    platform: Fleet
    key: Path
    web: Guest
    left: Guest
    peer: Guest
    third: Guest

    @property
    def address(self) -> str:
        return self.web.address

    def port_at(self, host: Host) -> str:
        """Return the name of the guest at the published port of a host; empty if none answers."""
        return by_port(self.key, host.box, "hostname").strip()

    def port6_at(self, host: Host) -> str:
        """Return the same for the host's IPv6 address, which it gets first."""
        address = f"fd00:200::{host.box.address.rpartition('.')[2]}"
        host.box.run(*_address6(address, "eth0"))
        subprocess.run(_address6(OUTSIDE6, BRIDGE), check=True)
        return by_port(self.key, host.box, "hostname", address=address).strip()


def _address6(address: str, link: str) -> list[str]:
    return ["ip", "-6", "addr", "replace", f"{address}/64", "dev", link, "nodad"]


@pytest.fixture(scope="module")
def platform() -> Iterator[Fleet]:
    with fleet(hosts=2, servers=1) as made:
        yield made


@pytest.fixture(scope="module")
def mesh(platform: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Mesh:
    key = made_key(tmp_path_factory.mktemp("mesh"))
    for name, number in (("mesh", 210), ("other", 211)):
        subnets = {"subnet": f"10.{number}.0.0/16", "subnet6": f"fd00:{number}::/64"}
        as_admin(platform, "create", name=name, spec={"kind": "overlay", **subnets})
    free = {"eviction_strategy": "None"}
    web = Guest(platform, "web", "n1", key, "mesh", "--publish", "2222:22", **free)
    left = Guest(platform, "left", "n1", key, "mesh")
    peer = Guest(platform, "peer", "n2", key, "mesh")
    third = Guest(platform, "third", "n1", key, "other")
    for guest in (web, left, peer, third):
        guest.wait()
    web.unpin()
    return Mesh(platform, key, web, left, peer, third)


def state(platform: Fleet, node: str) -> str:
    found: Json = json.loads(platform.cli("node", "get", node, "-o", "json"))
    return str(found["node"]["state"])


def is_at(mesh: Mesh, node: str) -> bool:
    return bool(mesh.web.view["node"] == node)


def bring(mesh: Mesh, node: str) -> None:
    """Move the guest to a node, if it is not there."""
    if not is_at(mesh, node):
        mesh.platform.cli("vm", "move", "web", "--to", node)
        until(partial(is_at, mesh, node), f"it moves to {node}", within_s=MOVED_S)
        mesh.web.wait()


def arp_replies_outside(mesh: Mesh, within_s: float = 2.0) -> list[bytes]:
    """Ask the hosts' own network for the guest's address; return the answers."""
    own, wanted = bytes.fromhex("020000000a01"), IPv4Address(mesh.address).packed
    ask = b"\xff" * 6 + own + b"\x08\x06" + struct.pack("!HHBBH", 1, 0x0800, 6, 4, 1)
    ask += own + IPv4Address("10.200.0.250").packed + bytes(6) + wanted
    found, end_s = [], time.monotonic() + within_s
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0806)) as packets:
        packets.bind((BRIDGE, 0x0806))
        packets.settimeout(0.2)
        while time.monotonic() < end_s:
            packets.send(ask)
            try:
                frame = packets.recv(2048)
            except TimeoutError:
                continue
            if frame[20:22] == b"\0\2" and frame[28:32] == wanted:
                found.append(frame)
    return found


def answered_once(asker: Guest, address: str) -> bool:
    """Return True if each ARP request and each ping of a guest gets one answer."""
    arp = asker.run(f"arping -b -c 3 -w 5 -I eth0 {address} || true")
    ping = asker.run(f"ping -c 3 -W 5 {address} || true")
    told = arp + ping
    return "Received 3 response" in arp and "3 packets received" in ping and "DUP" not in told


def names_of(asker: Guest) -> str:
    return asker.run("nslookup web.default.vm.internal 2>&1 || true")


def knows(asker: Guest, address: str) -> bool:
    return address in names_of(asker)


def has_no_name(asker: Guest) -> bool:
    return "NXDOMAIN" in names_of(asker)


def publishes_nothing(host: Host) -> bool:
    return "virtbus_ports" not in host.box.run("nft", "list", "tables")


def is_only_at(mesh: Mesh, here: Host, gone: Host) -> None:
    """The guest's port, address and name are at one host; the other host has no trace of it."""
    platform, web = mesh.platform, mesh.web
    until(lambda: mesh.port_at(here) == "web", f"the port answers at {here.name}", within_s=60)
    until(lambda: mesh.port6_at(here) == "web", "and at its IPv6 address", within_s=120)
    left: list[str] = []

    def is_gone() -> bool:
        left[:] = [line for line in gone.census() if web.view["uid"] in line]
        left[:] = [line for line in left if "/quarantine/" not in line]
        return not left and publishes_nothing(gone)

    until(is_gone, lambda: f"{gone.name} has nothing of it, but {left}", within_s=60)
    assert (mesh.port_at(gone), mesh.port6_at(gone)) == ("", "")
    assert arp_replies_outside(mesh) == []
    for asker in (mesh.left, mesh.peer):
        until(partial(answered_once, asker, mesh.address), f"{asker.name} gets one answer each")
        until(partial(knows, asker, mesh.address), f"{asker.name} knows its name")
    view = web.view
    assert (view["node"], view["interfaces"][0]["published"]) == (here.name, [PORT, PORT6])
    told = platform.cli("vm", "get", "web")
    assert re.search(rf"^Node\W+{here.name}$", told, re.MULTILINE)
    assert PORT in told
    path = platform.cli("vm", "net", "web")
    assert f"default/web on {here.name}" in path
    assert f"these ports of the host lead to the guest: {PORT}, {PORT6}" in path


@contextmanager
def steady(asker: Guest, address: str, seconds: int) -> Iterator[None]:
    """Ping from a guest all the time; fail if an answer came twice."""
    told: list[str] = []
    command = f"ping -i 0.5 -w {seconds} {address} || true"
    thread = threading.Thread(target=lambda: told.append(asker.run(command)))
    thread.start()
    try:
        yield
    finally:
        thread.join()
    assert "packets received" in told[0]
    assert "DUP" not in told[0]


@pytest.fixture
def sniffer(mesh: Mesh, tmp_path: Path) -> None:
    """Give the guest of the third network a program that captures frames."""
    source, program = tmp_path / "sniff.c", tmp_path / "sniff"
    source.write_text(_SNIFFER)
    build = ["gcc", "-static", "-s", "-O1", "-o", str(program), str(source)]
    subprocess.run(build, check=True)
    argv = ssh(mesh.key, mesh.third.address, "cat > /tmp/sniff && chmod +x /tmp/sniff")
    give = f"{shlex.join(argv)} < {program}"
    mesh.platform.hosts["n1"].box.run("bash", "-c", give)


@contextmanager
def captured(guest: Guest) -> Iterator[list[bytes]]:
    """Yield a list that has the frames at a guest's interface after the context."""
    frames: list[bytes] = []
    wait = "until [ -e /tmp/began ]; do kill -0 $! || exit; sleep 0.1; done"
    guest.run(f"setsid /tmp/sniff eth0 </dev/null >/tmp/frames 2>&1 & {wait}")
    yield frames
    told = guest.run("touch /tmp/end; while pidof sniff; do sleep 0.1; done >&2; cat /tmp/frames")
    frames.extend(bytes.fromhex(line) for line in told.split())


def is_of_mesh(frame: bytes) -> bool:
    """Return True for a frame with an address of the overlay `mesh`, 10.210.0.0/16."""
    places = {b"\x08\x00": (26, 30), b"\x08\x06": (28, 38)}.get(frame[12:14], ())
    return MARK in frame or any(frame[at : at + 2] == bytes((10, 210)) for at in places)


@pytest.mark.usefixtures("sniffer")
def test_a_capture_in_a_third_network_sees_none_of_the_traffic(mesh: Mesh) -> None:
    third, (n1, n2) = mesh.third, (mesh.platform.hosts[name] for name in ("n1", "n2"))
    bring(mesh, "n1")
    own, of_mesh = links_of(mesh.platform, "third"), links_of(mesh.platform, "web")
    with capture(n1.box) as packets, captured(third) as frames:
        n1.box.run("ping", "-c", "2", "-W", "5", "-p", "5a", "-s", "64", third.address)
        for one, other in ((mesh.web, mesh.peer), (mesh.peer, mesh.web), (mesh.left, mesh.web)):
            one.run(f"ping -c 2 -W 5 -p a5 -s 64 {other.address}")
        assert mesh.port_at(n1) == "web"
        marked = links_with(packets, MARK)
        n1.box.run("ping", "-c", "2", "-W", "5", "-p", "5a", "-s", "64", third.address)
    assert of_mesh & marked  # its cable; a bridge passes only frames for the host up
    assert not own & marked
    seen = [CONTROL in frame for frame in frames].count(True)
    assert seen == 8, "the pings before and after the traffic, and their answers"
    assert [frame.hex() for frame in frames if is_of_mesh(frame)] == []
    assert mesh.port_at(n2) == ""
    sys.stderr.write(f"\nthe third network's guest captured {len(frames)} frames, none of it\n")


def links_with(packets: socket.socket, mark: bytes) -> set[str]:
    """Return the links of a host on which frames with `mark` were captured."""
    found: set[str] = set()
    while True:
        try:
            frame, where = packets.recvfrom(65536)
        except BlockingIOError:
            return found
        if mark in frame:
            found.add(where[0])


def links_of(platform: Fleet, name: str) -> set[str]:
    """Return the links of a guest's interface on its host: its end of the cable, and the bridge."""
    (nic,) = json.loads(platform.cli("vm", "net", name, "-o", "json"))["interfaces"]
    return {nic["host_link"], nic["host_bridge"]}


def test_a_port_answers_at_the_old_host_before_a_move_and_at_the_new_one_after(mesh: Mesh) -> None:
    n1, n2 = (mesh.platform.hosts[name] for name in ("n1", "n2"))
    bring(mesh, "n1")
    before = mesh.address
    is_only_at(mesh, n1, n2)
    mesh.web.run(f"ping6 -c 1 -W 3 {OUTSIDE6}")
    bring(mesh, "n2")
    assert mesh.address == before
    is_only_at(mesh, n2, n1)
    mesh.web.run(f"ping6 -c 1 -W 3 {OUTSIDE6}")


def test_a_host_that_returns_from_a_partition_has_nothing_of_a_moved_guest(mesh: Mesh) -> None:
    platform = mesh.platform
    n1, n2 = (platform.hosts[name] for name in ("n1", "n2"))
    uid, before = mesh.web.view["uid"], mesh.address
    bring(mesh, "n2")
    n2.box.cut()
    try:
        until(lambda: state(platform, "n2") == "down", "n2 is silent", within_s=DOWN_S)
        platform.cli("node", "fence", "n2", "--confirm", "its power is cut")  # it is not
        until(lambda: is_at(mesh, "n1"), "it moves", within_s=MOVED_S)
        mesh.web.wait()
        assert uid in n2.emulators().values()
        assert mesh.port_at(n1) == "web"
    finally:
        n2.box.heal()
    with steady(mesh.left, before, 20):
        until(lambda: uid not in n2.emulators().values(), "n2 ends its guest", within_s=60)
    until(
        lambda: platform.try_cli("node", "unfence", "n2").returncode == 0, "unfenced", within_s=90
    )
    platform.wait_whole()
    assert mesh.address == before
    is_only_at(mesh, n1, n2)


def test_a_host_that_dies_and_returns_has_its_guests_addresses_names_and_ports(mesh: Mesh) -> None:
    platform = mesh.platform
    n1, n2 = (platform.hosts[name] for name in ("n1", "n2"))
    bring(mesh, "n1")
    before = mesh.address
    n1.off()
    assert (mesh.port_at(n1), mesh.port_at(n2)) == ("", "")
    n1.on()
    platform.wait_whole()
    for guest in (mesh.web, mesh.left):
        guest.wait()
    assert mesh.address == before
    is_only_at(mesh, n1, n2)


def test_a_deleted_guest_has_no_name_and_no_port_on_any_host(mesh: Mesh) -> None:
    platform = mesh.platform
    platform.cli("vm", "delete", "web", "--grace", "0")
    for asker in (mesh.left, mesh.peer):
        until(partial(has_no_name, asker), "the name is gone", within_s=60)
    for host in platform.hosts.values():
        assert mesh.port_at(host) == ""
        until(partial(publishes_nothing, host), f"{host.name} has no published port")
    for name in ("left", "peer", "third"):
        platform.cli("vm", "delete", name, "--grace", "0")
    platform.cli("network", "delete", "mesh", "other")
    for node in platform.hosts:
        listed = json.loads(platform.cli("node", "quarantine", "list", node, "-o", "json"))
        for entry in listed["entries"]:
            platform.cli("node", "quarantine", "purge", node, entry["entry"])
    platform.nothing_left()
