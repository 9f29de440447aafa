"""No writer can store more than the bound of a value's kind: the fake, and a real server."""

import asyncio

import pytest

from virtbus.bus.client import connection
from virtbus.bus.client.codec import read_message
from virtbus.bus.client.jetstream_errors import answer_of
from virtbus.bus.client.nats_bus import NatsBus
from virtbus.bus.client.ports import Bus, Message, Write
from virtbus.bus.errors import FullError, OversizeError
from virtbus.bus.provisioning.server import Server
from virtbus.schemas import bounds, subjects
from virtbus.schemas.events import Event, EventKind

UID = "0192f0c1-2d3e-7abc-8def-0123456789ab"
KEYS = (
    subjects.vm_record("n1", UID),
    subjects.name_claim("default", "web"),
    subjects.vm_secret("n1", UID),
    subjects.vm_status("n1", UID),
    subjects.lease("fleet"),
)


@pytest.mark.parametrize("key", KEYS)
async def test_a_value_is_stored_up_to_the_bound_of_its_kind_and_no_byte_more(
    bus: Bus, key: str
) -> None:
    most = bounds.bound_of(key).written_bytes
    with pytest.raises(OversizeError, match=str(most)):
        await bus.put(key, b"x" * (most + 1))
    assert await bus.get(key) is None
    revision = await bus.put(key, b"x" * most)
    with pytest.raises(OversizeError):
        await bus.batch([Write(key, b"x" * (most + 1), expect=revision)])


async def test_an_event_that_is_too_large_is_emitted_without_its_details(bus: Bus) -> None:
    event = Event(
        kind=EventKind.VM_FAILED,
        uid=UID,
        node="n1",
        message="m" * 200_000,
        detail={str(n): "d" * 1000 for n in range(300)},
    )
    subject = subjects.event("n1", UID, "vm.failed")
    bus.emit(subject, event, message_id="one")
    async with asyncio.timeout(10):
        while not (stored := await bus.history(subject)):
            await asyncio.sleep(0.05)
    assert len(stored[0].body) <= bounds.EVENT.written_bytes
    told = read_message(Event, Message(subject, stored[0].body))
    assert (told.uid, told.kind, told.detail) == (UID, EventKind.VM_FAILED, {})
    assert told.message.startswith("mmm")


@pytest.mark.integration
async def test_the_bus_itself_refuses_a_status_above_the_readers_bound(
    nats: Server,
) -> None:
    """Stolen credentials of a node may be used by a program without checks."""
    async with connection.connect(nats.settings("node-n1"), name="n1") as node:
        assert isinstance(node, NatsBus)
        for key in (subjects.vm_status("n1", UID), subjects.node_record("n1")):
            body = b"x" * (bounds.bound_of(key).read_bytes + bounds.HEADER_BYTES + 1)
            with pytest.raises(OversizeError):
                await node.put(key, body)
            with pytest.raises(FullError):
                await raw_put(node, key, body)


async def raw_put(bus: NatsBus, key: str, body: bytes) -> None:
    """Write without the checks of our own programs."""
    answer_of(await bus._records._persist(key, body, {}))
