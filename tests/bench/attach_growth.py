"""Attaches of the last hundred VMs of one host against the first hundred, by kind of network."""

import asyncio
import statistics
import subprocess
import time
from dataclasses import dataclass, field
from typing import Any

from tests.bench.figures import Figure
from tests.bench.netd_growth import DELIVERED_S, record_of
from tests.bench.stage import Stage

from virtbus.bus.client import connection
from virtbus.bus.client.nats_bus import NatsBus
from virtbus.bus.runtime.bus_settings import BusSettings
from virtbus.bus.runtime.ids import uuid7
from virtbus.schemas import subjects
from virtbus.schemas.wire import encode

LINK, UNDERLAY, ADDRESS = "growbr0", "growlan0", "192.0.2.1"
ENVIRONMENT = {
    "VIRTBUS_LINKS_ALLOWED": f'["{LINK}"]',
    "VIRTBUS_OVERLAY_ADDRESS": ADDRESS,
}
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


async def attach_growth(stage: Stage) -> list[Figure]:
    """Return, for each kind, the median of the last hundred attaches over the first hundred."""
    _make_links()
    figures: list[Figure] = []
    creds = next(stage.folder.rglob("admin.creds"))
    async with connection.connect(BusSettings(creds=creds), name="growth") as bus:
        for vni, kind in enumerate(KINDS, start=1):
            figures.append(await _growth(bus, kind, vni))
    return figures


async def _growth(bus: NatsBus, kind: Kind, vni: int) -> Figure:
    took_ms: list[float] = []
    uids: list[str] = []
    extra = _on_object(kind, vni) if kind.spec else {}
    try:
        for _ in range(kind.many + WARM):
            uid = uuid7()
            uids.append(uid)
            record = record_of(uid) | extra
            await bus.put(subjects.vm_record("bench", uid), encode(record))
            await asyncio.sleep(DELIVERED_S)
            begun = time.perf_counter()
            await bus.request(_rpc("ensure"), {"record": record}, timeout_s=30)
            took_ms.append((time.perf_counter() - begun) * 1000)
    finally:
        for uid in uids:
            await bus.request(_rpc("release"), {"uid": uid, "epoch": 1}, timeout_s=30)
            await bus.purge(subjects.vm_record("bench", uid))
        await asyncio.sleep(3)
    early = statistics.median(took_ms[WARM : WARM + HUNDRED])
    late = statistics.median(took_ms[-HUNDRED:])
    return Figure(
        f"{kind.name}: attach, last hundred of {kind.many} over the first",
        round(late / early, 2),
        "x",
        kind.bound,
        HUNDRED,
        note=f"{late:.1f} ms against {early:.1f} ms, request included",
    )


def _rpc(verb: str) -> str:
    return f"virtbus.node.bench.rpc.netd.{verb}"


def _on_object(kind: Kind, vni: int) -> dict[str, object]:
    """Return the fields of a record whose interface is on a network object."""
    target = {
        "uid": uuid7(),
        "namespace": "default",
        "name": kind.name,
        "spec": {"kind": kind.name, **kind.spec},
        "vni": vni,
    }
    spec = {
        "domain": {"devices": {"interfaces": [{"name": "default"}]}},
        "networks": [{"name": "default", "network": kind.name}],
    }
    return {"spec": spec, "network_targets": {kind.name: target}}


def _make_links() -> None:
    """Make the host's bridge of the kind `bridge`, and the link below the tunnels."""
    for words in (
        f"link add {LINK} type bridge",
        f"link set {LINK} up",
        f"link add {UNDERLAY} type veth peer name {UNDERLAY}p",
        f"address add {ADDRESS}/24 dev {UNDERLAY}",
        f"link set {UNDERLAY} up",
    ):
        subprocess.run(["ip", *words.split()], check=True)
