"""Attaches of the last hundred VMs of one host against the first hundred, by kind of network."""

import asyncio
import statistics
import subprocess
import time
from dataclasses import dataclass, field
from ipaddress import IPv4Address
from typing import Any

from tests.bench.figures import Figure
from tests.bench.measures import cpu_s
from tests.bench.netd_growth import DELIVERED_S, record_of
from tests.bench.stage import stage

from virtbus.bus.client import connection
from virtbus.bus.client.nats_bus import NatsBus
from virtbus.bus.runtime.bus_settings import BusSettings
from virtbus.bus.runtime.ids import uuid7
from virtbus.schemas import subjects
from virtbus.schemas.wire import encode

LINK, UNDERLAY, ADDRESS = "growbr0", "growlan0", "192.0.2.1"
VNI, FIRST = 1, "10.97.0.2"
"""The number of the overlay, and the first address that is claimed in it."""
ENVIRONMENT = {
    "VIRTBUS_LINKS_ALLOWED": f'["{LINK}"]',
    "VIRTBUS_OVERLAY_ADDRESS": ADDRESS,
}
BRIDGE, TIDY_S = "virtbus0", 120.0
"""netd's bridge, and the time in which it must go: the kernel frees a thousand namespaces first."""
HUNDRED = 100
WARM = 5
"""Attaches that load netd's code and make the bridge. They are not counted."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of network, the VMs on it, and the bound of its ratio."""

    name: str
    many: int
    bound: float
    spec: dict[str, Any] = field(default_factory=dict)
    """Of the network object; empty: the built-in network."""


KINDS = (
    Kind("nat", 1000, 1.3),
    Kind("routed", 1000, 1.3, {"subnets": {"bench": "10.96.0.0/16"}}),
    Kind("bridge", 500, 2.0, {"link": LINK}),
    Kind("overlay", 500, 2.0, {"subnet": "10.97.0.0/16"}),
)


async def attach_growth(kind: Kind) -> list[Figure]:
    """Return the median of the last hundred attaches over the first hundred on such a network."""
    _make_links()
    async with stage(None, **ENVIRONMENT) as here:
        creds = next(here.folder.rglob("admin.creds"))
        async with connection.connect(BusSettings(creds=creds), name="growth") as bus:
            return await _growth(bus, kind, here.pids()["netd"])


async def _growth(bus: NatsBus, kind: Kind, netd: int) -> list[Figure]:
    took_ms: list[float] = []
    cpu_ms: list[float] = []
    uids: list[str] = []
    network = uuid7()
    try:
        for number in range(kind.many + WARM):
            uid = uuid7()
            uids.append(uid)
            record = record_of(uid) | (_on_object(kind, network, number) if kind.spec else {})
            await bus.put(subjects.vm_record("bench", uid), encode(record))
            await asyncio.sleep(DELIVERED_S)
            begun, before_s = time.perf_counter(), cpu_s(netd)
            await bus.request(_rpc("ensure"), {"record": record}, timeout_s=30)
            took_ms.append((time.perf_counter() - begun) * 1000)
            cpu_ms.append((cpu_s(netd) - before_s) * 1000)
    finally:
        for uid in uids:
            await bus.request(_rpc("release"), {"uid": uid, "epoch": 1}, timeout_s=30)
            await bus.purge(subjects.vm_record("bench", uid))
        async with asyncio.timeout(TIDY_S):  # the next kind's netd needs a bridge of its own
            while _is_there(BRIDGE):
                await asyncio.sleep(0.2)
    of = f"attach, last hundred of {kind.many} over the first"
    return [
        _grown(f"{kind.name}: {of}", took_ms, kind.bound, "request included"),
        _grown(
            f"{kind.name}: CPU of netd, {of}", cpu_ms, None, "its links and namespaces included"
        ),
    ]


def _grown(name: str, each_ms: list[float], bound: float | None, note: str) -> Figure:
    early = statistics.median(each_ms[WARM : WARM + HUNDRED])
    late = statistics.median(each_ms[-HUNDRED:])
    note = f"{late:.1f} ms against {early:.1f} ms, {note}"
    return Figure(name, round(late / early, 2), "x", bound, HUNDRED, note=note)


def _rpc(verb: str) -> str:
    return f"virtbus.node.bench.rpc.netd.{verb}"


def _on_object(kind: Kind, network: str, number: int) -> dict[str, object]:
    """Return the fields of a record whose interface is on a network object."""
    target = {
        "uid": network,
        "namespace": "default",
        "name": kind.name,
        "spec": {"kind": kind.name, **kind.spec},
        "vni": VNI,
    }
    spec = {
        "domain": {"devices": {"interfaces": [{"name": "default"}]}},
        "networks": [{"name": "default", "network": kind.name}],
    }
    address = IPv4Address(FIRST) + number
    claims = {"default": {"network": network, "addresses": [str(address)]}}
    more = {"address_claims": claims} if kind.name == "overlay" else {}
    return {"spec": spec, "network_targets": {kind.name: target}, **more}


def _is_there(link: str) -> bool:
    argv = ["ip", "link", "show", link]
    return subprocess.run(argv, capture_output=True, check=False).returncode == 0


def _make_links() -> None:
    """Ensure the host's bridge of the kind `bridge`, and the link below the tunnels."""
    if _is_there(LINK):
        return
    for words in (
        f"link add {LINK} type bridge",
        f"link set {LINK} up",
        f"link add {UNDERLAY} type veth peer name {UNDERLAY}p",
        f"address add {ADDRESS}/24 dev {UNDERLAY}",
        f"link set {UNDERLAY} up",
    ):
        subprocess.run(["ip", *words.split()], check=True)
