"""Networks on segments of the host: a booted guest uses them, and its crafted frames are dropped."""

import asyncio
import json
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import IPv4Interface
from pathlib import Path
from typing import Any

import pytest
from services.netd.tests.segment import OUTSIDE, SERVER, Segment, run, segment
from tests.e2e.login import Login
from tests.e2e.platform import LINKS, Platform, until
from tests.e2e.test_networks import as_admin, vm

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

BRIDGE, INTERFACE = LINKS


@contextmanager
def dhcp(far: Segment, address: str) -> Iterator[None]:
    """A DHCP server on the segment that gives each guest one address."""
    stop = threading.Event()

    async def serve() -> None:
        async with asyncio.TaskGroup() as group:
            server = group.create_task(far.answer_dhcp(IPv4Interface(address)))
            while not stop.is_set():
                await asyncio.sleep(0.2)
            server.cancel()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@contextmanager
def segments() -> Iterator[None]:
    """The host's bridge, and an interface with a cable to another outside."""
    with segment(BRIDGE) as far:
        run(f"ip -n {OUTSIDE} addr add {SERVER}/24 dev lan1")
        run(f"ip link add {INTERFACE} type veth peer name wan1 netns {OUTSIDE}")
        run(f"ip link set {INTERFACE} up")
        run(f"ip -n {OUTSIDE} link set wan1 up")
        run(f"ip -n {OUTSIDE} addr add 198.51.100.1/24 dev wan1")
        from services.netd.tests.segment import outside

        with outside(OUTSIDE, "wan1") as packets:
            with dhcp(far, "192.0.2.10/24"), dhcp(Segment(packets), "198.51.100.10/24"):
                yield


def refused(platform: Platform, name: str) -> list[dict[str, int]]:
    shown = json.loads(platform.cli("vm", "get", name, "--counters", "-o", "json"))
    return [nic.get("refused") or {} for nic in shown["counters"]]


def test_a_guest_on_segments_has_their_addresses_and_its_crafted_frames_are_dropped(
    patient: Platform, tmp_path: Path
) -> None:
    login = Login(tmp_path)
    with segments():
        until(lambda: _reported(patient), "the node reports its links")
        as_admin(patient, "create", name="lan", spec={"kind": "bridge", "link": BRIDGE})
        as_admin(patient, "create", name="wan", spec={"kind": "macvtap", "link": INTERFACE})
        how: dict[str, Any] = {"folder": tmp_path, "key": login.public_key}
        view = vm(patient, "edge", "default", "lan", "wan", wait="ready", **how)

        def in_guest(command: str) -> str:
            return login(view, command).strip()

        def addresses() -> list[str]:
            nics = patient.get("edge")["interfaces"][1:]
            return [address for nic in nics for address in nic["addresses"]]

        until(lambda: addresses() == ["192.0.2.10/24", "198.51.100.10/24"], "two leases")
        in_guest(f"ping -c 1 -W 3 -I eth1 {SERVER}")
        in_guest("ping -c 1 -W 3 -I eth2 198.51.100.1")
        patient.wait_back("netd", patient.kill("netd"))
        in_guest(f"ping -c 1 -W 3 -I eth1 {SERVER}")
        before = refused(patient, "edge")
        for nic, net in (("eth1", "192.0.2"), ("eth2", "198.51.100")):
            # an address that is not its own: ARP, then IPv4 with a known neighbour
            in_guest(f"ip addr add {net}.77/24 dev {nic}")
            in_guest(f"ping -c 1 -W 1 -I {net}.77 {net}.1 || true")
            in_guest(f"ip neigh replace {net}.5 lladdr 02:00:00:00:00:05 dev {nic}")
            in_guest(f"ping -c 1 -W 1 -I {net}.77 {net}.5 || true")
            # the answer of a DHCP server, IPv6, a host of the fleet, and another MAC
            in_guest(f"ip addr del {net}.77/24 dev {nic}")
            in_guest(f"echo x | nc -u -w 1 -p 67 {net}.5 68 || true")
            in_guest(f"ip route add 169.254.169.254/32 via {net}.5")
            in_guest("ping -c 1 -W 1 169.254.169.254 || true; ip route del 169.254.169.254/32")
            in_guest(f"echo 0 > /proc/sys/net/ipv6/conf/{nic}/disable_ipv6 || true")
            in_guest(f"ip link set {nic} address 02:00:00:00:00:66; ping -c 1 -W 1 {net}.5 || true")
        after = refused(patient, "edge")
        for nic_before, nic_after in list(zip(before, after, strict=True))[1:]:
            grown = {rule for rule, count in nic_after.items() if count > nic_before.get(rule, 0)}
            assert grown >= {"mac", "arp", "address", "dhcp", "reach"}, (nic_before, nic_after)
        patient.delete("edge")
        patient.cli("network", "delete", "lan", "wan")
        patient.nothing_left()


def _reported(platform: Platform) -> bool:
    shown = (
        platform.ask("node.list")
        if False
        else json.loads(platform.cli("node", "list", "-o", "json"))
    )
    return all(link in json.dumps(shown) for link in LINKS)


__all__ = ["subprocess"]
