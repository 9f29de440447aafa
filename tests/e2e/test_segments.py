"""A booted guest with each kind of network: segments of the host, and spoofed frames on each."""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import IPv4Interface
from pathlib import Path
from typing import Any

import pytest
from services.netd.tests.segment import (
    OUTSIDE,
    SERVER,
    Segment,
    outside,
    run,
    segment,
)
from tests.e2e.frames import Crafter, spoofed
from tests.e2e.login import Login
from tests.e2e.platform import LINKS, Platform, until
from tests.e2e.test_networks import as_admin, vm

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(240)]

BRIDGE, INTERFACE = LINKS
LEASES = ["192.0.2.10/24", "198.51.100.10/24"]
SEGMENTS = "lan", "wan"
KINDS: dict[str, dict[str, Any]] = {
    "lan": {"kind": "bridge", "link": BRIDGE},
    "wan": {"kind": "macvtap", "link": INTERFACE},
    "shop": {"kind": "nat", "subnet": "10.203.0.0/24", "subnet6": "fd00:203::/64"},
    "dmz": {"kind": "routed", "subnets": {"e2e": "10.204.0.0/24"}},
    "lab": {"kind": "isolated", "subnet": "10.205.0.0/24"},
    "mesh": {"kind": "overlay", "subnet": "10.206.0.0/24", "subnet6": "fd00:206::/64"},
}
"""The networks of the guest by name: its interfaces have this order, after `default`."""


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
    with segment(BRIDGE) as lan:
        for command in (
            f"ip -n {OUTSIDE} addr add {SERVER}/24 dev lan1",
            f"ip addr add 192.0.2.99/24 dev {BRIDGE}",
            f"ip link add {INTERFACE} type veth peer name wan1 netns {OUTSIDE}",
            f"ip link set {INTERFACE} up",
            f"ip addr add 198.51.100.99/24 dev {INTERFACE}",
            f"ip -n {OUTSIDE} link set wan1 up",
            f"ip -n {OUTSIDE} addr add 198.51.100.1/24 dev wan1",
        ):
            run(command)
        with outside(OUTSIDE, "wan1") as wan, dhcp(lan, LEASES[0]), dhcp(Segment(wan), LEASES[1]):
            yield


def test_a_guest_on_each_kind_of_network_has_its_addresses_and_its_crafted_frames_are_dropped(
    patient: Platform, tmp_path: Path
) -> None:
    login = Login(tmp_path)
    with segments():

        def reported() -> bool:
            shown = patient.cli("node", "get", "e2e", "-o", "json")
            mtus = json.loads(shown)["node"].get("link_mtus")
            return mtus == dict.fromkeys(LINKS, 1500) and "192.0.2.99" in shown

        until(reported, "the node reports its links and addresses")
        for name, spec in KINDS.items():
            as_admin(patient, "create", name=name, spec=spec)
        how: dict[str, Any] = {"folder": tmp_path, "key": login.public_key}
        view = vm(patient, "edge", "default", *KINDS, wait="ready", **how)

        def leases() -> list[str]:
            nics = patient.get("edge")["interfaces"][1:3]
            return [address for nic in nics for address in nic["addresses"]]

        until(lambda: leases() == LEASES, "two leases")
        patient.wait_back("netd", patient.kill("netd"))
        login(view, f"ping -c 1 -W 3 -I eth1 {SERVER}")
        login(view, "ping -c 1 -W 3 -I eth2 198.51.100.1")
        each_spoofed_frame_is_counted(patient, Crafter(tmp_path, login, view))
        shown = patient.cli("vm", "net", "edge")
        assert f"{BRIDGE} -- segment" in shown
        assert f"on {INTERFACE} -- segment" in shown
        patient.delete("edge")
        patient.cli("network", "delete", *KINDS)
    patient.nothing_left()


SENT, LEAST = 4, 0.8
"""The frames of each kind, and the share that is counted. No rule has more than five kinds."""


def each_spoofed_frame_is_counted(platform: Platform, crafter: Crafter) -> None:
    """The guest sends each kind of frame on each interface; each rule counts its own.

    A few frames may be lost on a busy host. A kind that is not counted fails.
    """

    def refused() -> list[dict[str, int]]:
        shown = json.loads(platform.cli("vm", "get", "edge", "--counters", "-o", "json"))
        return [nic.get("refused") or {} for nic in shown["counters"]]

    nics = platform.get("edge")["interfaces"]
    assert len(nics) == 1 + len(KINDS)
    before, wanted = refused(), list[list[str]]()
    for place, nic in enumerate(nics):
        frames = spoofed(nic, on_segment=nic["network"] in SEGMENTS)
        wanted.append([rule for rule, _ in frames])
        for _ in range(SENT):
            assert crafter.send(f"eth{place}", (frame for _, frame in frames)) == len(frames)

    def missing() -> list[object]:
        """Return the rules that have not counted their frames yet."""
        return [
            (nic["network"], rule, had, has)
            for nic, had, has, rules in zip(nics, before, refused(), wanted, strict=True)
            for rule in set(rules)
            if has.get(rule, 0) - had.get(rule, 0) <= LEAST * SENT * rules.count(rule)
        ]

    until(lambda: not missing(), lambda: f"all frames are counted, but {missing()}")
