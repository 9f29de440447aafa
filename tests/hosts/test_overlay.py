"""An overlay on three hosts: guests reach each other by address and name, also after a move."""

import asyncio
import json
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from services.netd.tests.pretended_host import enter
from tests.e2e.platform import Json, until
from tests.hosts.box import Box
from tests.hosts.fleet import Fleet, fleet

from virtbus.bus.errors import BusError

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(600)]

MARK = b"\xa5" * 32
"""Bytes that the pings carry."""


@pytest.fixture(scope="module")
def platform() -> Iterator[Fleet]:
    with fleet(hosts=3, servers=1) as made:
        yield made


def as_admin(platform: Fleet, verb: str, **data: Any) -> Any:
    async def asked() -> Any:
        async with platform.bus("admin") as bus:
            return await bus.request(f"virtbus.api.v1.network.{verb}", data, timeout_s=30)

    return asyncio.run(asked())


def made_key(folder: Path) -> Path:
    key = folder / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    return key


def ssh(key: Path, address: str, command: str, port: int = 22) -> tuple[str, ...]:
    """Return the command that runs `command` in a guest."""
    options = ("StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "BatchMode=yes")
    flags = [word for option in (*options, "LogLevel=ERROR") for word in ("-o", option)]
    return ("ssh", "-i", str(key), "-p", str(port), *flags, f"root@{address}", command)


def by_port(key: Path, box: Box, command: str, port: int = 2222, address: str = "") -> str:
    """Return a guest's output by a published port of a host, asked from outside; empty: none."""
    argv = ssh(key, address or box.address, command, port)
    limits = ("-o", "ConnectTimeout=3", "-o", "ServerAliveInterval=5")  # 15 s without an answer
    done = subprocess.run(
        [argv[0], *limits, *argv[1:]], capture_output=True, text=True, check=False
    )
    return done.stdout if done.returncode == 0 else ""


class Guest:
    """A VM on one host, with commands in its guest by ssh from that host."""

    def __init__(
        self,
        platform: Fleet,
        name: str,
        node: str,
        key: Path,
        network: str,
        *flags: str,
        **spec: str,
    ) -> None:
        self._platform = platform
        self._key = key
        self.name = name
        pinned = {"node_selector": {"kubernetes.io/hostname": node}, **spec}
        file = key.parent / f"{name}.json"
        file.write_text(json.dumps({"image": "tiny", "memory": "128MiB", "spec": pinned}))
        wanted = ("-f", str(file), "--ssh-key", f"{key}.pub", "--network", network, *flags)
        platform.create(name, *wanted, wait="")

    @property
    def view(self) -> Json:
        found: Json = self._platform.ask("vm.get", {"name": self.name})
        return found

    @property
    def address(self) -> str:
        return self._addresses()[0]

    @property
    def address6(self) -> str:
        return next(one for one in self._addresses() if ":" in one)

    def _addresses(self) -> list[str]:
        found = self.view["interfaces"][0]["addresses"]
        return [str(one).partition("/")[0] for one in found]

    def run(self, command: str) -> str:
        """Return the output of a command in the guest; raise if it fails."""
        box = self._platform.hosts[self.view["node"]].box
        return box.run(*ssh(self._key, self.address, command), timeout_s=60)

    def unpin(self) -> None:
        """Let the guest move from its node."""
        view = self.view
        change = {"uid": view["uid"], "revision": view["revision"], "spec": view["spec"]}
        change["spec"].pop("node_selector")
        self._platform.ask("vm.update", change)

    def wait(self) -> None:
        def answers() -> bool:
            try:
                return bool(self.view.get("interfaces")) and "up" in self.run("echo up")
            except (AssertionError, subprocess.SubprocessError, LookupError, BusError):
                return False

        until(answers, f"the guest {self.name} answers", within_s=180)


def _has_left(guest: Guest, node: str) -> bool:
    return bool(guest.view["node"] != node)


def drain(platform: Fleet, node: str, *guests: Guest) -> None:
    """Move these guests, which are all of a node, to other nodes."""
    for guest in guests:
        guest.unpin()
    platform.cli("node", "drain", node, "--discard-local-disks")
    for guest in guests:
        until(partial(_has_left, guest, node), "the guest moves", within_s=120)


@contextmanager
def capture(box: Box) -> Iterator[socket.socket]:
    """A socket that gets every frame on each link of a host."""
    here = os.open("/proc/self/ns/net", os.O_RDONLY)
    there = os.open(f"/proc/{box.pid}/ns/net", os.O_RDONLY)
    try:
        enter(there)
        packets = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
    finally:
        enter(here)
        os.close(there)
        os.close(here)
    packets.setsockopt(socket.SOL_SOCKET, 33, 8 * 2**20)  # SO_RCVBUFFORCE
    packets.setblocking(False)
    with packets:
        yield packets


def seen(packets: socket.socket) -> bool:
    found = False
    while True:
        try:
            found |= MARK in packets.recv(65536)
        except BlockingIOError:
            return found


def _has_ipv6(guest: Guest) -> bool:
    return f"{guest.address6}/128" in guest.run("ip -6 addr show dev eth0")


def by_ipv6(one: Guest, two: Guest, there: Box, elsewhere: Box) -> None:
    """Guests of two hosts reach each other and the gateway; a third host sees nothing of it."""
    for guest in (one, two):
        until(partial(_has_ipv6, guest), "an address by DHCPv6", within_s=120)
    with capture(there) as on_the_way, capture(elsewhere) as third:
        one.run(f"ping6 -c 2 -W 3 -p a5 -s 1402 {two.address6}")
        two.run(f"ping6 -c 2 -W 3 -p a5 -s 1402 {one.address6}")
        assert (seen(on_the_way), seen(third)) == (True, False)
    one.run("ping6 -c 1 -W 3 fd00:210::1")
    assert two.address6 in one.run("nslookup -type=AAAA two.default.vm.internal")
    one.run("ping6 -c 1 -W 3 two.default.vm.internal")


def test_guests_of_two_hosts_reach_each_other_and_a_third_network_sees_nothing(
    platform: Fleet, tmp_path: Path
) -> None:
    key = made_key(tmp_path)
    mesh = {"kind": "overlay", "subnet": "10.210.0.0/16", "subnet6": "fd00:210::/64"}
    as_admin(platform, "create", name="mesh", spec=mesh)
    as_admin(platform, "create", name="other", spec={"kind": "overlay", "subnet": "10.211.0.0/16"})
    one = Guest(platform, "one", "n1", key, "mesh")
    two = Guest(platform, "two", "n2", key, "mesh")
    third = Guest(platform, "third", "n3", key, "other")
    for guest in (one, two, third):
        guest.wait()
    (n1, n2, n3) = (platform.hosts[name].box for name in ("n1", "n2", "n3"))
    with capture(n2) as there, capture(n3) as elsewhere:
        until(lambda: "1 packets received" in one.run(f"ping -c 1 -W 2 {two.address} || true"), "")
        seen(there)
        one.run(f"ping -c 2 -W 3 -p a5 -s 1422 {two.address}")
        two.run(f"ping -c 2 -W 3 -p a5 -s 1422 {one.address}")
        assert (seen(there), seen(elsewhere)) == (True, False)
    assert one.run("cat /sys/class/net/eth0/mtu").strip() == "1450"
    by_ipv6(one, two, n2, n3)
    one.run("ping -c 1 -W 3 two.default.vm.internal")
    two.run("ping -c 1 -W 3 one.default.vm.internal")
    one.run("ping -c 1 -W 3 10.200.0.254")  # the outside, by the host's address
    closed = "ping -c 1 -W 1 {} >/dev/null 2>&1 && echo open || echo closed"
    for address in (third.address, n1.address, n2.address):
        assert one.run(closed.format(address)).strip() == "closed"

    before, before6 = two.address, two.address6
    drain(platform, "n2", two)
    two.wait()
    assert (two.address, two.address6) == (before, before6)
    until(lambda: "1 packets received" in one.run(f"ping6 -c 1 -W 2 {before6} || true"), "")
    until(lambda: "1 packets received" in one.run(f"ping -c 1 -W 2 {before} || true"), "")
    assert "vbx" not in n2.run("ip", "-o", "link")  # the old host has no part of it any more
    platform.cli("node", "uncordon", "n2")
    for name in ("one", "two", "third"):
        platform.cli("vm", "delete", name, "--grace", "0")
    platform.cli("network", "delete", "mesh", "other")
    platform.nothing_left()


def test_a_claimed_address_is_kept_over_a_move_and_a_restart_of_the_host(
    platform: Fleet, tmp_path: Path
) -> None:
    key = made_key(tmp_path)
    kept = {"kind": "nat", "subnet": "10.212.0.0/16", "pool": "fleet"}
    as_admin(platform, "create", name="kept", spec=kept)
    chosen = Guest(platform, "chosen", "n1", key, "kept")
    static = Guest(platform, "static", "n1", key, "kept", "--address", "10.212.7.7")
    for guest in (chosen, static):
        guest.wait()
    before = chosen.address

    def each_has_its_own() -> None:
        for guest, address in ((chosen, before), (static, "10.212.7.7")):
            guest.wait()
            assert guest.address == address
            assert f"{address}/16" in guest.run("ip -4 addr show dev eth0")

    drain(platform, "n1", chosen, static)
    each_has_its_own()
    platform.cli("node", "uncordon", "n1")
    for name in {chosen.view["node"], static.view["node"]}:
        platform.hosts[name].off()
        platform.hosts[name].on()
    platform.wait_whole()
    each_has_its_own()
    platform.cli("vm", "delete", "chosen", "static", "--grace", "0")
    platform.cli("network", "delete", "kept")
    platform.nothing_left()
