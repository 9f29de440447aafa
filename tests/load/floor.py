"""The floor: a bare loop that does a create's durable writes, and nothing else."""

import time
from functools import partial

from nats.aio.client import Client
from nats.js.client import JetStreamContext
from tests.load.population import closed_loop
from tests.load.servers import PASSWORD, USER, Servers

from virtbus.bus.ids import uuid7
from virtbus.schemas import subjects

RECORD_BYTES, STATUS_BYTES, CLAIM_BYTES = 600, 330, 60
"""As large as the product's own."""
_EXPECT = "Nats-Expected-Last-Subject-Sequence"


async def one(js: JetStreamContext, node: str, statuses: int) -> None:
    """Claim, record and status puts of one VM, with the product's compare-and-set headers."""
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
    for _ in range(statuses):
        await js.publish(
            subjects.vm_status(node, uid), b"x" * STATUS_BYTES, headers={"Nats-Msg-Id": uuid7()}
        )


async def floor(servers: Servers, creates: int, in_flight: int, statuses: int) -> float:
    """Creates per second of the bare loop, on streams that are declared."""
    client = Client()
    await client.connect(list(servers.url.split(",")), user=USER, password=PASSWORD)
    js = client.jetstream(timeout=10)
    begun = time.monotonic()
    try:
        works = (partial(one, js, f"floor-{n % 200:03d}", statuses) for n in range(creates))
        await closed_loop(works, in_flight)
        return creates / (time.monotonic() - begun)
    finally:
        await client.close()
