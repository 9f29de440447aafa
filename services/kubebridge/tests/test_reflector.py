"""List and watch over HTTP: the cache converges to the server's state after any answers."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from services.kubebridge.tests.faulty import Faulty, served

from virtbus.bus.runtime.sources import Sources
from virtbus.bus.runtime.tasks import background
from virtbus.kubebridge.core.runtime.controller import CONFIG_MAP
from virtbus.kubebridge.edge import cluster
from virtbus.kubebridge.edge.lease import LeaseHolder
from virtbus.kubebridge.edge.runtime.reflector import Reflector
from virtbus.kubebridge.edge.runtime.store import ObjectStore


class OneLease:
    """An API server with one Lease."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] = {"metadata": {"resourceVersion": "50"}}

    async def get(self, *_: object) -> dict[str, Any]:
        return deepcopy(self.lease)

    async def replace(self, _: object, lease: dict[str, Any]) -> dict[str, Any]:
        version = int(self.lease["metadata"]["resourceVersion"]) + 1
        self.lease = {**lease, "metadata": {"resourceVersion": str(version)}}
        return deepcopy(self.lease)


class Watched:
    """A faulty server, and a cache of its objects."""

    def __init__(self, server: Faulty, client: cluster.KubernetesApi) -> None:
        self.server = server
        self.objects = ObjectStore()
        self.changed: list[str] = []
        self.objects.notify = self.changed.append
        self.following = Reflector(client, CONFIG_MAP, self.objects)

    def stored(self) -> dict[str, str]:
        found = {name: self.objects.get(name) for name in self.objects}
        return {name: one["data"]["value"] for name, one in found.items() if one is not None}

    async def agrees(self) -> None:
        """Wait until the cache equals the server's objects."""
        while self.stored() != {
            f"n/{name}": one["data"]["value"] for name, one in self.server.objects.items()
        }:
            await asyncio.sleep(0.01)


@asynccontextmanager
async def watched(tmp_path: Path, server: Faulty | None = None) -> AsyncIterator[Watched]:
    server = server or Faulty()
    async with (
        served(server, tmp_path) as kubeconfig,
        cluster.connect(kubeconfig) as client,
        background() as tasks,
    ):
        here = Watched(server, client)
        tasks.start(here.following.run())
        yield here


async def test_a_list_of_many_pages_is_followed_by_changes(tmp_path: Path) -> None:
    server = Faulty()
    for number in range(cluster.PAGE * 2 + 1):
        server.put(f"a{number}")
    async with watched(tmp_path, server) as here:
        await here.following.synced.wait()
        await here.agrees()
        assert server.asked[:3] == ["list"] * 3
        server.put("a0", "new")
        server.put("b")
        server.delete("a1")
        await here.agrees()
        assert server.asked.count("list") == 3


async def test_deletions_are_found_after_a_lost_version(tmp_path: Path) -> None:
    async with watched(tmp_path) as here:
        here.server.put("stays")
        here.server.put("goes")
        await here.agrees()
        here.changed.clear()
        here.server.delete("goes")
        here.server.put("comes")
        here.server._log.clear()
        here.server.forget()
        here.server.hang_up()
        await here.agrees()
        assert sorted(set(here.changed)) == ["n/comes", "n/goes"]
        assert here.server.asked.count("list") == 2


@pytest.mark.parametrize("status", [0, 1, 200, 429, 500, 503])
async def test_a_failed_watch_resumes_at_its_version(tmp_path: Path, status: int) -> None:
    async with watched(tmp_path) as here:
        here.server.put("a")
        await here.agrees()
        here.server.faults += [("watch", status, {})] * 3
        here.server.hang_up()
        here.server.put("b")
        here.server.delete("a")
        await here.agrees()
        assert here.server.faults == []
        assert here.server.asked.count("list") == 1, "what a watch can tell needs no list"


@pytest.mark.parametrize("status", [0, 403, 404, 410, 429, 500])
async def test_a_failed_list_is_repeated(tmp_path: Path, status: int) -> None:
    server = Faulty()
    server.put("a")
    server.faults += [("list", status, {})] * 2
    async with watched(tmp_path, server) as here:
        await here.agrees()
        assert server.asked[:3] == ["list"] * 3


async def test_retry_after_is_respected(tmp_path: Path) -> None:
    server = Faulty()
    server.faults.append(("list", 429, {"Retry-After": "1"}))
    begun = time.monotonic()
    async with watched(tmp_path, server) as here:
        await here.following.synced.wait()
        assert time.monotonic() - begun >= 1


async def test_watches_that_end_at_once_are_retried_with_growing_delays(
    tmp_path: Path,
) -> None:
    server = Faulty()
    server.faults += [("watch", 200, {})] * 1000
    async with watched(tmp_path, server) as here:
        await here.following.synced.wait()
        await asyncio.sleep(1.0)
        assert server.asked.count("watch") <= 8


async def test_a_server_that_comes_back_is_watched_again(tmp_path: Path) -> None:
    server = Faulty()
    server.put("a")
    async with watched(tmp_path, server) as here:
        await here.agrees()
        await server.close()
        server.put("b")
        await asyncio.sleep(0.3)
        assert here.stored() == {"n/a": ""}, "nothing is taken for gone"
        await server.open()
        await here.agrees()
        assert here.server.asked.count("list") == 1


async def test_an_own_write_is_stored_at_once_and_not_undone_by_the_watch() -> None:
    objects = ObjectStore()

    def one(version: int, value: str, uid: str = "u") -> dict[str, object]:
        meta = {"name": "a", "namespace": "n", "uid": uid, "resourceVersion": str(version)}
        return {"metadata": meta, "value": value}

    objects.put(one(5, "read"))
    objects.wrote(one(7, "ours"))
    objects.put(one(6, "of another, before ours"))
    assert (objects.get("n/a") or {})["value"] == "ours"
    objects.drop("n/a")
    objects.wrote(one(8, "late"))
    assert objects.get("n/a") is None, "what is gone stays gone"
    objects.put(one(3, "another's", uid="v"))
    assert objects.uid("n/a") == "v"


async def test_an_object_missing_in_a_list_is_absent_but_not_ended(tmp_path: Path) -> None:
    """An API server that was restored to an older state lacks newer objects (ADR 0033)."""
    server = Faulty()
    for name in ("kept", "deleted", "lost", "ending"):
        server.put(name)
    async with watched(tmp_path, server) as here:
        await here.following.synced.wait()
        server.delete("deleted")
        await here.agrees()
        del server.objects["lost"]
        server.objects["ending"]["metadata"]["deletionTimestamp"] = "2026-11-23T10:00:00Z"
        server.forget()
        server.hang_up()
        await here.agrees()
        ended = [name for name in ("kept", "deleted", "lost", "ending") if here.objects.ended(name)]
        assert ended == ["deleted", "ending"]


async def test_after_a_restore_of_etcd_the_cache_has_its_older_objects(tmp_path: Path) -> None:
    server = Faulty()
    server.put("changed", "old")
    async with watched(tmp_path, server) as here:
        await here.agrees()
        backup, version = dict(server.objects), server.version
        for number in range(50):
            server.put("changed", f"new {number}")
        server.put("lost")
        await here.agrees()
        server.restore(backup, version)
        server.put("changed", "after the restore")
        await asyncio.sleep(0.3)
        assert here.stored() == {"n/changed": "new 49", "n/lost": ""}, (
            "a watch shows no lower version"
        )
        here.following.list_again()
        await here.agrees()
        server.put("changed", "later")
        await here.agrees()
        assert not here.objects.ended("lost")
        await server.close()
        await asyncio.sleep(0.1)
        here.following.list_again()
        here.following.list_again()
        await server.open()
        server.put("changed", "after another restore")
        await here.agrees()


async def test_a_lease_of_a_lower_version_shows_a_restored_api_server() -> None:
    here = OneLease()
    found: list[str] = []
    restored = partial(found.append, "restored")
    sources = Sources(uniform=lambda _least, _most: 0.001)
    holder = LeaseHolder(cast("Any", here), "n", "me", asyncio.Event(), restored, sources)
    async with background() as tasks:
        tasks.start(holder.run())
        while here.lease["metadata"]["resourceVersion"] != "53":
            await asyncio.sleep(0.001)
        assert found == []
        here.lease["metadata"]["resourceVersion"] = "2"
        while here.lease["metadata"]["resourceVersion"] != "5":
            await asyncio.sleep(0.001)
    assert found == ["restored"]
