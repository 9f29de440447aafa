"""netd at the 300th VM against the 10th: attachments only, requested over the bus."""

import asyncio
import statistics
import time

from tests.bench.figures import Figure
from tests.bench.stage import Stage

from virtbus.bus.client import connection
from virtbus.bus.runtime.bus_settings import BusSettings
from virtbus.bus.runtime.ids import uuid7
from virtbus.schemas import subjects
from virtbus.schemas.wire import encode

MANY = 300
AROUND = 10
DELIVERED_S = 0.01
"""Time until netd has a record: it refuses a request for one that the bus does not have."""


async def netd_growth(stage: Stage) -> list[Figure]:
    """Median of an attach around the 10th and around the 300th VM, and of a release."""
    creds = next(stage.folder.rglob("admin.creds"))
    ensure, release = (f"virtbus.node.bench.rpc.netd.{verb}" for verb in ("ensure", "release"))
    took: list[float] = []
    uids: list[str] = []
    releases: list[float] = []
    async with connection.connect(BusSettings(creds=creds), name="growth") as bus:
        try:
            for _ in range(MANY):
                uid = uuid7()
                uids.append(uid)
                record = record_of(uid)
                await bus.put(subjects.vm_record("bench", uid), encode(record))
                await asyncio.sleep(DELIVERED_S)
                begun = time.perf_counter()
                await bus.request(ensure, {"record": record}, timeout_s=30)
                took.append(time.perf_counter() - begun)
        finally:
            for uid in uids:
                begun = time.perf_counter()
                await bus.request(release, {"uid": uid, "epoch": 1}, timeout_s=30)
                releases.append((time.perf_counter() - begun) * 1000)
                await bus.purge(subjects.vm_record("bench", uid))
        await asyncio.sleep(3)
    early = statistics.median(took[5 : 5 + AROUND])
    late = statistics.median(took[-AROUND:])
    return [
        Figure(
            "attach at the 300th VM over the 10th",
            round(late / early, 2),
            "x",
            2.0,
            AROUND,
            note=f"{late * 1000:.1f} ms against {early * 1000:.1f} ms, request included",
        ),
        Figure(
            "network release to the caller",
            round(statistics.median(releases), 2),
            "ms",
            None,
            MANY,
            note="request and answer over the bus included",
        ),
    ]


def record_of(uid: str) -> dict[str, object]:
    """Return the record of a VM with one interface on the built-in network."""
    return {
        "uid": uid,
        "namespace": "default",
        "name": f"n{uid[-12:]}",
        "node": "bench",
        "spec_hash": "0",
        "created_ns": 1,
        "powered": False,
        "spec": {
            "domain": {"devices": {"interfaces": [{"name": "default"}]}},
            "networks": [{"name": "default"}],
        },
    }
