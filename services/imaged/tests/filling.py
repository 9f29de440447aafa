"""Fills of a node's volumes, without its bus."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.imaged.tests.records import uid
from services.imaged.tests.site_under_test import FAST, Node

from virtbus.imaged.backup_checks import BackupChecks
from virtbus.imaged.core.limits import SpaceLimits, TransferLimits
from virtbus.imaged.disk_jobs import DiskJobs
from virtbus.imaged.edge.disk_places import DiskPlaces
from virtbus.imaged.edge.disk_threads import DiskThreads
from virtbus.imaged.edge.export_conversion import ExportSource, convert
from virtbus.imaged.edge.pools import Pools
from virtbus.imaged.exports import Converter
from virtbus.imaged.fills import FillParts, Fills
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.node_rpc import FillWork, WorkState
from virtbus.schemas.operation import ExportFormat
from virtbus.schemas.volume_ref import FillSource, VolumeRef

CONTENT = b"copied bytes"
AT = 1024 * 1024
"""Position of CONTENT in the file of a copy, behind the tables of the empty disk."""


@dataclass
class Copies:
    """A converter that writes CONTENT once it may."""

    may: asyncio.Event = field(default_factory=asyncio.Event)
    begun: int = 0
    error: VirtbusError | None = None

    def __post_init__(self) -> None:
        self.may.set()

    async def __call__(
        self,
        source: ExportSource,
        target: int,
        format_: ExportFormat,
        limits: TransferLimits,
        look: Callable[[], Awaitable[None]],
        into: tuple[str, ...] = (),
    ) -> None:
        del source, format_, limits, into
        self.begun += 1
        os.pwrite(target, CONTENT, AT)
        await look()
        await self.may.wait()
        if self.error is not None:
            raise self.error


class Filled:
    """Counts the calls after fills."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> None:
        self.times += 1


def work(of: VolumeRef, do: str = "ensure", **source: Any) -> FillWork:
    return FillWork.model_validate(
        {"id": uid(90), "do": do, "ref": of, "source": FillSource.model_validate(source)}
    )


@contextlib.asynccontextmanager
async def filling(
    node: Node,
    threads: DiskThreads,
    converter: Converter = convert,
    space: SpaceLimits | None = None,
    filled: Callable[[], None] = Filled(),  # noqa: B008  nobody counts the default's calls
    pools: Pools | None = None,
    backups: BackupChecks | None = None,
) -> AsyncIterator[Fills]:
    """Fills that end with the context, as the process does."""
    pools = pools or Pools(node.files, limits=space)
    places = DiskPlaces(pools, node.store)
    parts = FillParts(node.disks, node.images, node.store, places, pools, threads, FAST, backups)
    async with asyncio.TaskGroup() as group:
        jobs = DiskJobs(group)
        yield Fills(jobs, parts, filled, converter)
        for id_ in jobs.ids:
            await jobs.end(id_)


async def ended(fills: Fills, want: FillWork) -> WorkState:
    """Repeat a request until the fill has ended; return its end."""
    while (state := await fills.do(want)).state == "working":
        await asyncio.sleep(0.01)
    return state


def folder(node: Node, of: VolumeRef) -> Path:
    return node.state / "disks" / "volumes" / of.folder


def names(node: Node, of: VolumeRef) -> list[str]:
    """Return the files of a volume, without those that only an unprivileged imaged writes."""
    there = folder(node, of)
    found = [path.name for path in there.iterdir()] if there.exists() else []
    return sorted(name for name in found if name != "disk.json")
