"""Objects that a reconcile waits for are watched, and only while somebody waits."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from services.kubebridge.tests.faulty import Faulty, served

from virtbus.bus.runtime.tasks import background
from virtbus.kubebridge.core.runtime.controller import CONFIG_MAP, VMI, Key
from virtbus.kubebridge.edge import cluster
from virtbus.kubebridge.edge.runtime.references import References

WHO, OTHER = Key(VMI, "n", "one"), Key(VMI, "n", "two")


def config(name: str) -> frozenset[Key]:
    return frozenset({Key(CONFIG_MAP, "n", name)})


class Waiting:
    """A server, and the keys that changes of its objects queue."""

    def __init__(self, server: Faulty, client: cluster.KubernetesApi) -> None:
        self.server = server
        self.queued: asyncio.Queue[Key] = asyncio.Queue()
        self.references = References(client, self.queued.put_nowait)

    async def watches(self) -> None:
        """Wait until the server has an open watch."""
        while not self.server.watches:
            await asyncio.sleep(0.01)


@asynccontextmanager
async def waiting(tmp_path: Path) -> AsyncIterator[Waiting]:
    server = Faulty()
    async with (
        asyncio.timeout(30),
        served(server, tmp_path) as kubeconfig,
        cluster.connect(kubeconfig) as client,
        background() as tasks,
    ):
        here = Waiting(server, client)
        tasks.start(here.references.run())
        yield here


async def test_a_new_or_changed_object_queues_who_waits_for_it(tmp_path: Path) -> None:
    async with waiting(tmp_path) as here:
        here.references.wait(WHO, config("a"))
        here.references.wait(OTHER, config("b"))
        await here.watches()
        here.server.put("other")
        here.server.put("a")
        assert await here.queued.get() == WHO
        here.server.put("b")
        assert await here.queued.get() == OTHER
        here.server.put("a", "changed")
        assert await here.queued.get() == WHO
        here.server.delete("a")
        assert await here.queued.get() == WHO
        assert here.server.asked == ["watch"], "one watch for a namespace, and no list"
        assert here.server.accepted == {
            "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
        }


async def test_a_change_before_the_watch_is_found_by_it(tmp_path: Path) -> None:
    async with waiting(tmp_path) as here:
        here.server.put("a")
        here.references.wait(WHO, config("a"))
        assert await here.queued.get() == WHO


async def test_a_change_between_a_read_and_the_wait_for_it_is_not_lost(tmp_path: Path) -> None:
    async with waiting(tmp_path) as here:
        here.references.wait(WHO, config("a"))
        await here.watches()
        here.references.wait(OTHER, config("b"))
        assert await here.queued.get() == OTHER
        here.references.wait(OTHER, config("b"))
        await asyncio.sleep(0.1)
        assert here.queued.empty(), "it has read the object while it waits"


async def test_without_permission_to_watch_the_object_is_read_again_and_again(
    tmp_path: Path,
) -> None:
    async with waiting(tmp_path) as here:
        here.server.faults = [("watch", 403, {})] * 3
        here.references.wait(WHO, config("a"))
        for _ in range(3):
            assert await here.queued.get() == WHO


async def test_nothing_is_watched_when_nobody_waits(tmp_path: Path) -> None:
    async with waiting(tmp_path) as here:
        here.references.wait(WHO, config("a"))
        await here.watches()
        here.references.wait(WHO, frozenset())
        while here.server.watches:
            await asyncio.sleep(0.01)
        here.server.put("a")
        await asyncio.sleep(0.1)
        assert here.queued.empty()
        assert not here.references._waiting
