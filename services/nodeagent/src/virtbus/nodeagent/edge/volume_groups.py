"""Makes, grows, marks and removes the logical volumes of pools of the kind `lvm` (ADR 0088).

imaged requests each step. A mark is an LVM tag with the number of bytes that are filled. The module
touches only logical volumes with the tag of the requested volume.
"""

import asyncio
import errno
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

from virtbus.bus.runtime.device_socket import LogicalAnswer, LogicalRequest
from virtbus.bus.runtime.pool_settings import LvmPool, PoolSettings
from virtbus.nodeagent.core import logical_volumes as lvm
from virtbus.nodeagent.core.logical_volumes import LogicalVolume
from virtbus.nodeagent.edge.atomic_file import in_thread
from virtbus.nodeagent.edge.lvm_commands import LvmCommands
from virtbus.nodeagent.edge.pool_servers import Tell
from virtbus.schemas.pool import MESSAGE_MAX, PoolReport, PoolState

REPORT_S = 10.0
"""Interval of the reports. Each report runs two commands."""
PAGE = 200
Answer = tuple[LogicalAnswer, int | None]


class VolumeGroup:
    """One pool of the kind `lvm`. Its requests are carried out one after another."""

    def __init__(
        self, name: str, pool: LvmPool, commands: LvmCommands, devices: str = "/dev"
    ) -> None:
        self._name = name
        self._pool = pool
        self._commands = commands
        self._devices = devices
        self._one_at_a_time = asyncio.Lock()
        self._gone = ""
        """The reason why the last report failed or a command timed out; "" if the group answers.
        With a reason, requests are refused until a report succeeds, so that none of them hangs."""

    async def do(self, want: LogicalRequest) -> Answer:
        """Carry out a request; return the answer, and an open device or None.

        The caller must close the device.

        Raises:
            OSError: LVM refuses (the text is LVM's reason), the pool has no room (ENOSPC), or the
                group does not answer (`_gone`).
            ValueError: LVM's report cannot be read, or the request contradicts the report.
        """
        async with self._one_at_a_time:
            if self._gone:
                raise OSError(0, self._gone)
            if want.do == "list":
                return self._page(await self._volumes(), want.volume), None
            if not want.volume:
                msg = f"{want.do} needs a volume"
                raise ValueError(msg)
            volume = f"{self._name}/{want.volume}"
            there = lvm.find(await self._volumes(), volume)
            if want.do == "make":
                return await self._make(volume, there, want.size_bytes)
            if there is None:
                return self._missing(want), None
            return await self._change(volume, there, want)

    async def measured(self) -> PoolReport:
        async with self._one_at_a_time:
            try:
                report = await self._report()
                self._gone = ""
            except (OSError, ValueError) as error:
                self._gone = getattr(error, "strerror", None) or str(error)
                return PoolReport(
                    name=self._name,
                    kind=self._pool.kind,
                    state=PoolState.GONE,
                    message=self._gone[:MESSAGE_MAX],
                )
            return report

    # --- one request, under the lock --------------------------------------------------------
    async def _run(self, words: Sequence[str]) -> str:
        try:
            return await self._commands.run(words)
        except TimeoutError as error:
            self._gone = str(error)
            raise OSError(0, self._gone) from None

    async def _volumes(self) -> list[LogicalVolume]:
        return lvm.volumes_of(await self._run(lvm.list_volumes(self._pool)))

    async def _report(self) -> PoolReport:
        room = lvm.room_of(await self._run(lvm.list_group(self._pool)))
        return lvm.report_of(self._name, self._pool, room, await self._volumes())

    def _missing(self, want: LogicalRequest) -> LogicalAnswer:
        if want.do in {"open", "unmark", "remove"}:
            return LogicalAnswer()
        msg = f"the pool {self._name} has no logical volume of {want.volume}"
        raise ValueError(msg)

    async def _make(self, volume: str, there: LogicalVolume | None, size_bytes: int) -> Answer:
        if there is not None:
            if there.filled[0]:
                msg = f"the logical volume of {volume} has its content"
                raise ValueError(msg)
            await self._remove(volume)
        await self._refuse_full(size_bytes)
        await self._run(lvm.make(self._pool, volume, size_bytes))
        return await self._opened(volume)

    async def _change(self, volume: str, there: LogicalVolume, want: LogicalRequest) -> Answer:
        match want.do:
            case "remove":
                await self._remove(volume)
                return LogicalAnswer(), None
            case "mark" | "unmark":
                filled_bytes = want.size_bytes if want.do == "mark" else 0
                if filled_bytes > there.size_bytes:
                    msg = f"the logical volume of {volume} has {there.size_bytes} bytes"
                    raise ValueError(msg)
                done = lvm.mark(self._pool, volume, there, filled_bytes, want.operation)
                if done:
                    await self._run(done)
                return self._answer(lvm.find(await self._volumes(), volume)), None
            case "grow" if there.size_bytes < want.size_bytes:
                await self._refuse_full(want.size_bytes - there.size_bytes)
                await self._run(lvm.grow(self._pool, volume, want.size_bytes))
                return await self._opened(volume)
        return await self._opened(volume, there)

    async def _remove(self, volume: str) -> None:
        """Remove a logical volume; raise OSError if LVM fails, or if the volume still exists."""
        await self._run(lvm.remove(self._pool, volume))
        if lvm.find(await self._volumes(), volume) is not None:
            raise OSError(0, f"LVM has not removed the logical volume of {volume}")

    async def _refuse_full(self, more_bytes: int) -> None:
        report = await self._report()
        if why := lvm.why_no_room(report, more_bytes, thin=bool(self._pool.thin_pool)):
            raise OSError(errno.ENOSPC, why)

    async def _opened(self, volume: str, there: LogicalVolume | None = None) -> Answer:
        path = lvm.device_path(self._pool, volume, self._devices)
        if not await in_thread(Path(path).exists):  # not yet activated since the host's boot
            await self._run(lvm.activate(self._pool, volume))
        answer = self._answer(there or lvm.find(await self._volumes(), volume))
        opened: list[int] = []
        try:
            await in_thread(lambda: opened.append(_open_block(path)))
        except BaseException:
            for device in opened:
                os.close(device)
            raise
        return answer, opened[0]

    def _answer(self, there: LogicalVolume | None) -> LogicalAnswer:
        if there is None:
            return LogicalAnswer()
        filled_bytes, operation = there.filled
        return LogicalAnswer(
            size_bytes=there.size_bytes,
            filled_bytes=filled_bytes,
            operation=operation,
            thin=bool(self._pool.thin_pool),
        )

    def _page(self, volumes: Sequence[LogicalVolume], after: str) -> LogicalAnswer:
        pool = lvm.of_pool(volumes, self._name)
        found = sorted((folder, one.size_bytes) for folder, one in pool if folder > after)
        return LogicalAnswer(volumes=dict(found[:PAGE]), more=len(found) > PAGE)


def _open_block(path: str) -> int:
    """Open a device for reading and writing; raise OSError also if it is in exclusive use."""
    device = os.open(path, os.O_RDWR | os.O_EXCL | os.O_CLOEXEC)
    if not stat.S_ISBLK(os.fstat(device).st_mode):
        os.close(device)
        raise OSError(0, f"{path} is no block device")
    return device


def followed_groups(
    tasks: asyncio.TaskGroup, pools: Mapping[str, PoolSettings], tell: Tell
) -> dict[str, VolumeGroup]:
    """Return the volume groups of a node's pools, by pool; start a task that reports each group."""
    groups = {
        name: VolumeGroup(name, pool, LvmCommands())
        for name, pool in pools.items()
        if isinstance(pool, LvmPool)
    }
    for name, group in groups.items():
        tasks.create_task(_report(name, group, tell))
    return groups


async def _report(name: str, group: VolumeGroup, tell: Tell) -> None:
    while True:
        tell(f"group {name}", (await group.measured(),))
        await asyncio.sleep(REPORT_S)
