"""A bus that is restored in place has lower revisions; the caches take its values nevertheless."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from services.controller.tests.fleets import record, uid
from services.controller.tests.virtual import settle
from services.controller.tests.volumes import volume

from virtbus.bus.client.memory_bus import MemoryBus, MemoryServer
from virtbus.bus.runtime.tasks import background
from virtbus.controller.core.fleet import Fleet
from virtbus.controller.core.vm_keys import StoredVolume
from virtbus.controller.edge.informers import Informers
from virtbus.controller.edge.watch_server import WatchServer
from virtbus.schemas import subjects
from virtbus.schemas.hosts import HostRecord
from virtbus.schemas.node import NodeSpec
from virtbus.schemas.security_group import GroupSpec, NodeGroup, SecurityGroupRecord
from virtbus.schemas.wire import encode

DATA = subjects.volume_record("default", "data")
GROUP = GroupSpec.model_validate({"selector": {"labels": {"app": "web"}}})
VALUES: dict[str, Callable[[str], Any]] = {
    subjects.vm_record("n1", uid(1)): lambda text: record(1, labels={"is": text}),
    DATA: lambda text: volume(2, labels={"is": text}),
    subjects.security_group("default", "web"): lambda text: SecurityGroupRecord(
        uid=uid(3), namespace="default", name="web", spec=GROUP, created_ns=1, owner=text
    ),
    subjects.node_group("n1", "default", "web"): lambda text: NodeGroup(
        uid=uid(3), namespace="default", name="web", spec=GROUP, owner=text
    ),
    subjects.node_spec("n1"): lambda text: NodeSpec(node="n1", requests=(text,)),
    subjects.node_host("n1"): lambda text: HostRecord(node="n1", requests=(text,)),
}


def cached(fleet: Fleet) -> list[object]:
    """Return the cached values of the keys of VALUES, in that order."""
    group, host = fleet.groups.get("default", "web"), fleet.hosts.record("n1")
    data = fleet.volumes.get("default", "data")
    assert group is not None
    assert data is not None
    return [
        fleet.vms[uid(1)].record,
        data.record,
        group.record,
        *(value for value, _ in fleet.groups.on_nodes.values()),
        fleet.node_spec_of("n1"),
        host,
    ]


def values(text: str) -> list[object]:
    return [make(text) for make in VALUES.values()]


class Followed:
    """A controller's cache, its bus, and a connection that writes."""

    def __init__(self) -> None:
        self.server = MemoryServer()
        self.bus, self.writer = MemoryBus(self.server, "c"), MemoryBus(self.server, "w")
        self.fleet = Fleet()
        self.feeds = Informers(self.bus, self.fleet, WatchServer(self.fleet, self.bus, "c"))

    async def write(self, text: str) -> None:
        for key, make in VALUES.items():
            await self.writer.put(key, encode(make(text)))
        await settle()

    async def restore(self, revision: int, text: str) -> None:
        """Replace the store by another one, which begins after `revision`."""
        self.bus.disconnect()
        shelf = self.server.shelf(DATA)
        shelf.entries.clear()
        shelf.revision = revision
        await self.write(text)
        self.bus.reconnect()
        await settle()


@pytest.fixture
async def followed() -> AsyncIterator[Followed]:
    one = Followed()
    async with background() as tasks:
        tasks.start(one.feeds.run())
        await settle()
        yield one


async def test_the_values_of_a_restored_bus_replace_newer_ones(followed: Followed) -> None:
    await followed.write("old")
    for _ in range(3):
        await followed.write("new")
    assert cached(followed.fleet) == values("new")
    await followed.restore(0, "old")
    assert cached(followed.fleet) == values("old")
    await followed.write("newer")
    assert cached(followed.fleet) == values("newer")


async def test_a_restored_value_may_have_the_revision_of_another_one(followed: Followed) -> None:
    await followed.write("new")
    await followed.writer.put(DATA, encode(volume(2, labels={"is": "newest"})))
    await settle()
    await followed.restore(0, "old")  # revisions as in the first line, but for one
    assert cached(followed.fleet) == values("old")


async def test_our_own_writes_on_a_restored_bus_are_known_at_once(followed: Followed) -> None:
    for _ in range(3):
        await followed.write("new")
    await followed.restore(0, "old")
    revision = followed.server.shelf(DATA).revision
    assert not followed.fleet.networks.delivered(1)
    followed.fleet.volumes.apply(StoredVolume(volume(9, "more"), revision + 1))
    assert followed.fleet.volumes.get("default", "more") is not None


async def test_a_value_that_a_restored_bus_lacks_is_forgotten(followed: Followed) -> None:
    await followed.write("new")
    await followed.writer.put(subjects.node_spec("n9"), encode(NodeSpec(node="n9", cordoned=True)))
    await settle()
    await followed.restore(0, "old")
    assert not followed.fleet.node_spec_of("n9").cordoned
