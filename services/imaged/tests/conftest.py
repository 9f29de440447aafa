"""Fixtures: a web server on loopback, and imaged wired as in its service."""

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

# pytest's importlib mode puts no test folder on the path; shared fixtures are imported here.
sys.path.insert(0, str(Path(__file__).parents[3]))

from services.imaged.tests.site_under_test import FAST, Node, NodeMaker, Web

from virtbus.bus.runtime.pool_settings import PoolSettings
from virtbus.imaged.core.limits import SpaceLimits
from virtbus.imaged.disks import Disks
from virtbus.imaged.edge.alias_files import AliasFiles
from virtbus.imaged.edge.containers import Containers, Registries
from virtbus.imaged.edge.devices import OpenDevice
from virtbus.imaged.edge.disk_files import DiskFolders
from virtbus.imaged.edge.disk_threads import DiskThreads
from virtbus.imaged.edge.download import Downloads
from virtbus.imaged.edge.eviction import Eviction
from virtbus.imaged.edge.local_files import LocalFiles
from virtbus.imaged.edge.logical_volumes import AskLogical, no_group
from virtbus.imaged.edge.pools import Pools, no_device
from virtbus.imaged.edge.store import ImageStore
from virtbus.imaged.images import Images


@pytest.fixture
async def server() -> AsyncIterator[Web]:
    site = Web()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", site.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    listener = web.TCPSite(runner, "127.0.0.1", 0)
    await listener.start()
    site.base = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield site
    finally:
        await runner.cleanup()


@pytest.fixture
def threads() -> Iterator[DiskThreads]:
    pool = DiskThreads()
    yield pool
    pool.close()


@pytest.fixture
def make_node(tmp_path: Path, threads: DiskThreads) -> NodeMaker:
    """A node on tmp_path; leaving it is a clean stop, and the next one finds its state."""

    @contextlib.asynccontextmanager
    async def make(
        *, state: Path | None = None, min_free_bytes: int = 0, checkpoint_bytes: int = 64 * 1024,
        registries: Registries | None = None, quota_bytes: int = 0,
        wanted: Callable[[], frozenset[str] | None] = frozenset,
        pool_settings: Mapping[str, PoolSettings] | None = None,
        open_device: OpenDevice = no_device, ask_logical: AskLogical = no_group, **limits: Any,
    ) -> AsyncIterator[Node]:  # fmt: skip
        bounds = replace(FAST, **limits)
        state = state or tmp_path / "state"
        source_dir, names_dir = tmp_path / "source", tmp_path / "images.d"
        for path in (source_dir, names_dir):
            path.mkdir(exist_ok=True)
        store = ImageStore(
            state / "images",
            SpaceLimits(min_free_bytes, 0.0, quota_bytes),
            checkpoint_bytes=checkpoint_bytes,
        )
        files = DiskFolders(state / "disks")
        roots = (str(source_dir),)
        try:
            async with asyncio.TaskGroup() as group:
                downloads = Downloads(bounds, threads)
                known = registries or Registries()
                names = AliasFiles(names_dir, {}, roots)
                images = Images(
                    group,
                    store=store,
                    threads=threads,
                    names=names,
                    files=LocalFiles(roots, bounds, threads),
                    http=downloads,
                    containers=Containers(store, threads, downloads, bounds, known),
                    limits=bounds,
                )
                space = SpaceLimits(min_free_bytes, 0.0)
                pools = Pools(files, pool_settings, space, open_device, ask_logical)
                disks = Disks(images, store, pools, threads, bounds.max_virtual_bytes, time.time_ns)
                store.space.make_room_by(Eviction(store, disks.users, names, wanted).make_room)
                yield Node(state, source_dir, store, files, images, disks, names_dir)
                images.stop()
        finally:
            files.close()
            store.close()

    return make
