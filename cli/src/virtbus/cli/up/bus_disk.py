"""Watches the disk of the bus, and restarts a stalled server once there is space.

After a write to a stream has failed on a full disk, nats-server 2.15 answers no more writes to this
stream until a restart. VMs run without the server, so a restart does not affect them.
"""

import asyncio
import os
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from virtbus.bus.client.nats_bus import NatsBus
from virtbus.bus.errors import BusError
from virtbus.bus.provisioning.server import ServerFiles
from virtbus.cli.up.disk_policy import DiskAction, Room, step
from virtbus.cli.up.plan import rest_s
from virtbus.schemas import subjects
from virtbus.schemas.quantity import format_bytes
from virtbus.schemas.storage import BusStorage

LOOK_S = 1.0
PROBE_S = 2.0
LOW_PROBE_S = 5.0
"""Interval of test writes while the disk has little space."""
TELL_S = 5.0
BUCKETS = ("vm", "sec", "st", "lease")
_FAILED = re.compile(
    r"failed to store a msg on stream '\S+ > (\w+)': .*"
    r"(?:no space left|quota exceeded|input/output error|read-only)"
)


class StatusPrinter(Protocol):
    """The method of `Terminal` that this module uses."""

    def say(self, text: str, level: str = "INFO") -> None: ...


class BusDisk:
    """Watches the disk of one server.

    `admin` is an admin's connection to the server, and `restart` restarts the server.
    """

    def __init__(
        self,
        files: ServerFiles,
        admin: NatsBus,
        terminal: StatusPrinter,
        restart: Callable[[], Awaitable[None]],
    ) -> None:
        self._files = files
        self._admin = admin
        self._terminal = terminal
        self._restart = restart
        self._reserve = files.store / "reserve"
        self._log_bytes = _size(files.log)
        self._named: set[str] = set()
        self._stuck: set[str] = set()
        self._restarts = 0
        self._not_before_s = 0.0
        self._probed_s = self._told_s = float("-inf")
        self._state = ""

    async def keep(self) -> None:
        while True:
            try:
                await self._look()
            except OSError as error:
                self._terminal.say(f"the disk of the bus cannot be checked: {error}", "WARNING")
            await asyncio.sleep(LOOK_S)

    async def _look(self) -> None:
        room = self._room()
        self._named |= self._heard()
        await self._try(room)
        stalled = sorted({*self._named, *self._stuck})
        await self._tell(_state(room, stalled))
        now_s = asyncio.get_running_loop().time()
        match step(room, stalled=bool(stalled)):
            case DiskAction.RESTART if now_s >= self._not_before_s:
                self._restarts += 1
                self._not_before_s = now_s + 5 * rest_s(self._restarts)
                self._terminal.say("nats-server stores nothing; it is started again", "WARNING")
                await self._restart()
                self._named.clear()
                self._log_bytes = _size(self._files.log)
            case DiskAction.GIVE:
                self._terminal.say("the bus's reserve file is deleted for space", "WARNING")
                self._reserve.unlink(missing_ok=True)
            case DiskAction.TAKE:
                await asyncio.to_thread(self._take, room.reserve_bytes)
                self._restarts = 0
            case _:
                pass

    def _room(self) -> Room:
        space = os.statvfs(self._files.store)
        return Room(
            space.f_bavail * space.f_frsize,
            space.f_blocks * space.f_frsize,
            self._reserve.exists(),
        )

    def _take(self, size_bytes: int) -> None:
        with suppress(OSError), self._reserve.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, size_bytes)

    def _heard(self) -> set[str]:
        """Return the streams with failed writes in the new lines of the server's log."""
        size = _size(self._files.log)
        if size == self._log_bytes:
            return set()
        start, self._log_bytes = (self._log_bytes if size > self._log_bytes else 0), size
        with self._files.log.open("rb") as file:
            file.seek(start)
            text = file.read(size - start).decode("utf-8", "replace")
        return set(_FAILED.findall(text))

    async def _try(self, room: Room) -> None:
        now_s = asyncio.get_running_loop().time()
        late = now_s - self._probed_s > LOW_PROBE_S
        if not self._admin.connected or not (self._named or self._stuck or (room.low and late)):
            return
        self._probed_s = now_s
        stuck: set[str] = set()

        async def probe(bucket: str) -> None:
            try:
                async with asyncio.timeout(PROBE_S):
                    await self._admin.purge(subjects.storage_probe(bucket), marker_ttl_s=1)
            except (BusError, TimeoutError):
                stuck.add(f"KV_{bucket}")

        generation = self._admin.generation
        async with asyncio.TaskGroup() as group:
            for bucket in BUCKETS:
                group.create_task(probe(bucket))
        # If the connection was lost during the probes, a failure proves nothing.
        if self._admin.connected and self._admin.generation == generation:
            self._stuck = stuck

    async def _tell(self, state: BusStorage) -> None:
        now_s = asyncio.get_running_loop().time()
        kind = "stalled" if state.stalled else "low" if state.low else ""
        if kind != self._state:
            level = {"stalled": "ERROR", "low": "WARNING"}.get(kind, "INFO")
            self._terminal.say(state.message or "the bus stores again and has room", level)
        elif now_s - self._told_s < TELL_S:
            return
        self._state, self._told_s = kind, now_s
        await self._admin.publish(subjects.bus_storage(), state)


def _state(room: Room, stalled: list[str]) -> BusStorage:
    free = format_bytes(room.free_bytes)
    message = ""
    if stalled:
        message = (
            f"the bus stores nothing (its disk has {free} free): free space on the host of the bus;"
            " the server then restarts by itself; VMs keep running; repeat with the same id"
        )
    elif room.low:
        message = (
            f"the bus's disk has only {free} free: creates stop so that deletes still fit;"
            f" delete VMs or free space there ({format_bytes(room.low_bytes)} are needed)"
        )
    return BusStorage(
        free_bytes=room.free_bytes,
        total_bytes=room.total_bytes,
        low=room.low,
        stalled=tuple(stalled),
        message=message,
    )


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
