"""The floor: a bare loop that only does a create's durable writes."""

import asyncio
import time
from dataclasses import dataclass
from functools import partial

from nats.aio.client import Client
from nats.js.client import JetStreamContext
from tests.load.population import closed_loop
from tests.load.servers import PASSWORD, USER, Servers

from virtbus.bus.runtime.ids import uuid7
from virtbus.schemas import subjects

RECORD_BYTES, STATUS_BYTES, CLAIM_BYTES, FACT_BYTES = 600, 330, 60, 480
"""As large as the product's own."""
_EXPECT = "Nats-Expected-Last-Subject-Sequence"


@dataclass(frozen=True, slots=True)
class Writes:
    """Durable writes of a create besides its claim and its record."""

    statuses: int
    facts: int


BARE = Writes(statuses=1, facts=0)
"""Without it no client could see that its VM runs."""
SAME = Writes(statuses=1, facts=6)
"""The minimum of the product: under load it writes more statuses, and never fewer of either.

The events are accepted, scheduled, defined, started, ready, and its spans.
"""


async def one(js: JetStreamContext, node: str, writes: Writes) -> None:
    """Write claim, record, statuses and events of one VM, with the product's headers."""
    uid = uuid7()
    message_id = {"Nats-Msg-Id": uid}
    claim = subjects.name_claim("floor", f"f-{uid[-12:]}")
    await js.publish(claim, b"x" * CLAIM_BYTES, headers={_EXPECT: "0"} | message_id)
    anywhere = {_EXPECT: "0", f"{_EXPECT}-Subject": subjects.vm_anywhere(uid)}
    await js.publish(
        subjects.vm_record(node, uid),
        b"x" * RECORD_BYTES,
        headers=anywhere | {"Nats-Msg-Id": uuid7()},
    )
    for _ in range(writes.statuses):
        await js.publish(
            subjects.vm_status(node, uid), b"x" * STATUS_BYTES, headers={"Nats-Msg-Id": uuid7()}
        )
    async with asyncio.TaskGroup() as group:
        for number in range(writes.facts):
            fact = f"virtbus.evt.{node}.{uid}.floor.{number}"
            message_id = {"Nats-Msg-Id": uuid7()}
            group.create_task(_fact(js, fact, message_id))


async def _fact(js: JetStreamContext, subject: str, headers: dict[str, str]) -> None:
    await js.publish(subject, b"x" * FACT_BYTES, headers=headers)


async def floor(servers: Servers, creates: int, in_flight: int, writes: Writes) -> float:
    """Return creates per second of the bare loop, on declared streams."""
    client = Client()
    await client.connect(list(servers.url.split(",")), user=USER, password=PASSWORD)
    js = client.jetstream(timeout=10)
    begun = time.monotonic()
    try:
        works = (partial(one, js, f"floor-{n % 200:03d}", writes) for n in range(creates))
        await closed_loop(works, in_flight)
        return creates / (time.monotonic() - begun)
    finally:
        await client.close()
