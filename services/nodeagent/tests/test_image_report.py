"""A node reports keys of its images in a record of its own, after changes; not by heartbeat."""

from pathlib import Path
from typing import Any

from services.nodeagent.tests.pretended_node import NODE, Node, eventually

from virtbus.bus.client.memory_bus import MemoryBus, MemoryServer
from virtbus.bus.errors import UnavailableError
from virtbus.bus.runtime.tasks import background
from virtbus.nodeagent.image_report import ImageReport
from virtbus.schemas import subjects
from virtbus.schemas.image import MAX_IMAGE_KEYS, image_key
from virtbus.schemas.node import NodeImages, NodeState, ServiceState
from virtbus.schemas.node_rpc import ServiceReport
from virtbus.schemas.wire import encode, read

KEY = subjects.node_images(NODE)
MANY = tuple(sorted(image_key(str(n)) for n in range(MAX_IMAGE_KEYS)))


async def stored(bus: MemoryBus) -> tuple[tuple[str, ...], int]:
    """Return the keys on the bus, and their revision."""
    entry = await bus.get(KEY)
    return ((), 0) if entry is None else (read(NodeImages, entry.value).keys, entry.revision)


async def test_a_heartbeat_is_as_small_with_many_images_as_with_none(tmp_path: Path) -> None:
    node = Node(tmp_path)
    await node.join()
    async with node.agent():
        service_report = ServiceReport(
            service="imaged", state=ServiceState(state=NodeState.READY), image_keys=MANY
        )

        async def reported() -> bool:
            await node.bus.publish(subjects.service_report(NODE, "imaged"), service_report)
            return (await stored(node.bus))[0] == MANY

        await eventually(reported)
        beat = await node.bus.get(subjects.node_record(NODE))
        assert beat is not None
        assert len(beat.value) < 2 * 1024
        assert MANY[0].encode() not in beat.value
        images = await node.bus.get(KEY)
        assert images is not None
        assert len(images.value) < 16 * 1024


async def test_the_key_is_written_when_the_images_change_and_only_then() -> None:
    bus = MemoryBus(MemoryServer(), "agent")

    async def tell(image_report: ImageReport, keys: tuple[str, ...]) -> None:
        image_report.set_keys(keys)

        async def there() -> bool:
            return (await stored(bus))[0] == keys

        await eventually(there)

    async with background() as tasks:
        tasks.start((image_report := ImageReport(bus, NODE, pause_s=0)).run())
        for keys in (MANY[:1], MANY[:1], MANY[:2]):
            await tell(image_report, keys)
    _, revision = await stored(bus)
    assert revision == 2
    async with background() as tasks:  # a restarted agent
        tasks.start((image_report := ImageReport(bus, NODE, pause_s=0)).run())
        await tell(image_report, MANY[:2])
        await tell(image_report, MANY[:3])
    assert (await stored(bus))[1] == revision + 1


async def test_an_unreadable_value_is_overwritten_and_a_missing_bus_is_retried() -> None:
    class Flaky(MemoryBus):
        fails = 2

        async def put(self, key: str, value: bytes, **more: Any) -> int:
            if self.fails:
                self.fails -= 1
                raise UnavailableError("away")
            return await super().put(key, value, **more)

    server = MemoryServer()
    await MemoryBus(server, "other").put(KEY, b"\xc1garbage")
    bus = Flaky(server, "agent")
    image_report = ImageReport(bus, NODE, pause_s=0)
    async with background() as tasks:
        tasks.start(image_report.run())
        image_report.set_keys(())

        async def there() -> bool:
            entry = await bus.get(KEY)
            return entry is not None and entry.value == encode(NodeImages(node=NODE))

        await eventually(there)
