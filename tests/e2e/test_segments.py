"""Networks on segments of the host: a booted guest uses them, and its crafted frames are lost."""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import IPv4Interface
from pathlib import Path
from typing import Any

import pytest
from services.netd.tests.pretended_host import Frames
from services.netd.tests.segment import (
    OUTSIDE,
    SERVER,
    Segment,
    crafted,
    outside,
    run,
    segment,
)
from tests.e2e.frames import Crafter
from tests.e2e.login import Login
from tests.e2e.platform import LINKS, Platform, until
from tests.e2e.test_networks import as_admin, vm

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

BRIDGE, INTERFACE = LINKS
LEASES = ["192.0.2.10/24", "198.51.100.10/24"]


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


def test_a_guest_on_segments_has_their_addresses_and_its_crafted_frames_are_dropped(
    patient: Platform, tmp_path: Path
) -> None:
    login = Login(tmp_path)
    with segments():

        def reported() -> bool:
            shown = patient.cli("node", "get", "e2e", "-o", "json")
            return all(f'"{link}"' in shown for link in LINKS) and "192.0.2.99" in shown

        until(reported, "the node reports its links and addresses")
        as_admin(patient, "create", name="lan", spec={"kind": "bridge", "link": BRIDGE})
        as_admin(patient, "create", name="wan", spec={"kind": "macvtap", "link": INTERFACE})
        how: dict[str, Any] = {"folder": tmp_path, "key": login.public_key}
        view = vm(patient, "edge", "default", "lan", "wan", wait="ready", **how)

        def leases() -> list[str]:
            nics = patient.get("edge")["interfaces"][1:]
            return [address for nic in nics for address in nic["addresses"]]

        def refused() -> list[dict[str, int]]:
            shown = json.loads(patient.cli("vm", "get", "edge", "--counters", "-o", "json"))
            return [nic.get("refused") or {} for nic in shown["counters"][1:]]

        until(lambda: leases() == LEASES, "two leases")
        patient.wait_back("netd", patient.kill("netd"))
        login(view, f"ping -c 1 -W 3 -I eth1 {SERVER}")
        login(view, "ping -c 1 -W 3 -I eth2 198.51.100.1")
        crafter = Crafter(tmp_path, login, view)
        for place, (link, lease) in enumerate(zip(("eth1", "eth2"), LEASES, strict=True)):
            before = refused()[place]
            frames = crafted(Frames(patient.get("edge")["interfaces"][place + 1]["mac"], lease))
            wanted = [rule for rule, _ in frames.values()]
            assert crafter.send(link, (frame for _, frame in frames.values())) == len(frames)
            after = refused()[place]
            for rule in set(wanted):
                assert after[rule] - before.get(rule, 0) >= wanted.count(rule), (link, rule)
        shown = patient.cli("vm", "net", "edge")
        assert f"{BRIDGE} -- segment" in shown
        assert f"on {INTERFACE} -- segment" in shown
        patient.delete("edge")
        patient.cli("network", "delete", "lan", "wan")
    patient.nothing_left()
