"""Users of backups and of their schedules."""

import asyncio
from typing import Any

from tests.sim.users import GaveUpError, Plan, User, guarded
from tests.sim.world import World, client_role

from virtbus.schemas.backup import BackupMode
from virtbus.schemas.errors import VirtbusError

REFUSED = frozenset(
    {
        *("vm_not_found", "deleting", "unplaced", "vm_runs", "backup_not_found", "backup_needed"),
        *("operation_quota", "operation_ended", "operation_final", "operation_open", "deleted"),
        *("operation_not_found", "backup_schedule_not_found", "name_taken", "volume_in_use"),
        *("volume_not_found", "uid_taken", "no_node", "store_error", "no_snapshots"),
    }
)
"""Refusals that another user's action, or an earlier attempt, explains."""


class _Asker(User):
    """A user who tries something else after a refusal that others explain."""

    async def _try(self, resource: str, verb: str, data: dict[str, Any]) -> Any:
        """Return the answer, None after such a refusal."""
        try:
            return await self._ask(verb, data, resource)
        except VirtbusError as error:
            if error.reason not in REFUSED:
                raise
            return None

    async def _vm(self) -> str:
        """Return the name of a VM that is there now, most often."""
        while True:
            known = self._observer.wanted.values()
            names = [one.name for one in known if one.accepted and not one.delete_accepted]
            if names:
                return self._rng.choice(names)
            await asyncio.sleep(2.0)


class BackupUser(_Asker):
    """Makes backups of any VM, and cancels, verifies, restores and deletes some."""

    volume = ""

    async def run(self) -> None:
        """Run until the users make no more changes."""
        rng = self._rng
        await asyncio.sleep(rng.uniform(10.0, 30.0))
        try:
            while self._left_s() > 0:
                vm = await self._vm()
                for _ in range(rng.randrange(1, 4)):
                    await self._make(vm)
                await rng.choice((self._verify, self._delete, self._delete, self._restore))()
        except GaveUpError:
            return

    async def _make(self, vm: str) -> None:
        rng, id_ = self._rng, self._bus.sources.uuid7()
        mode = rng.choice((BackupMode.AUTO, BackupMode.FULL, BackupMode.INCREMENTAL))
        asked = {"vm": vm, "id": id_, "mode": mode, "chain": rng.randrange(1, 4)}
        if await self._try("backup", "create", asked) is None:
            return
        await asyncio.sleep(rng.uniform(0.0, 25.0))
        if rng.random() < 0.2:
            await self._try("operation", "cancel", {"id": id_})

    async def _known(self) -> dict[str, Any] | None:
        """Return one of the backups of the fleet."""
        page = await self._try("backup", "list", {})
        return self._rng.choice(page["items"]) if page["items"] else None

    async def _verify(self) -> None:
        if (one := await self._known()) is not None:
            operation = self._bus.sources.uuid7()
            await self._try("backup", "verify", {"id": one["id"], "operation": operation})

    async def _delete(self) -> None:
        if (one := await self._known()) is not None:
            self._observer.backups.delete_asked.add(one["id"])
            await self._try("backup", "delete", {"id": one["id"]})

    async def _restore(self) -> None:
        """Fill a new volume with a disk of a backup, and start a new VM with it."""
        rng, one = self._rng, await self._known()
        if one is None:
            return
        whole = await self._try("backup", "get", {"id": one["id"]})
        if whole is None or not whole["disks"]:
            return
        self.volume = f"back-{self._number}-{int(self._loop.time())}"
        about = {"name": self.volume, "node": whole["node"], "uid": self._bus.sources.uuid7()}
        source = {"backup": whole["id"], "disk": whole["disks"][0]["name"]}
        asked = about | {"spec": {"size": 0, "source": source}}
        if await self._try("volume", "create", asked) is None:
            return
        wanted = self.new()
        if await self.create(wanted):
            await asyncio.sleep(rng.uniform(0.0, 40.0))
            await self.delete(wanted)
        self._observer.volumes.delete_asked.add(about["uid"])
        while self._left_s() > 0:
            if await self._try("volume", "delete", {"name": self.volume, "uid": about["uid"]}):
                return
            await asyncio.sleep(rng.uniform(2.0, 10.0))

    def _data(self, wanted: Any) -> dict[str, Any]:
        data = super()._data(wanted)
        data["spec"]["volumes"] = [{"name": "data", "volume": {"name": self.volume}}]
        return data


class ScheduleUser(_Asker):
    """The life of one schedule name: a schedule, changes, maybe a delete, then another one."""

    async def run(self) -> None:
        """Run until the users make no more changes; the schedules continue."""
        rng, about = self._rng, {"name": f"schedule-{self._number}"}
        await asyncio.sleep(rng.uniform(5.0, 40.0))
        try:
            while self._left_s() > 0:
                spec = {"vm": await self._vm(), "chain": rng.randrange(1, 4), **self._fields()}
                asked = about | {"uid": self._bus.sources.uuid7(), "spec": spec}
                await self._try("backup-schedule", "create", asked)
                for _ in range(rng.randrange(3)):
                    await asyncio.sleep(rng.uniform(0.0, 60.0))
                    more = self._fields() | {"suspended": rng.random() < 0.2}
                    await self._try("backup-schedule", "update", about | more)
                await asyncio.sleep(rng.uniform(10.0, 90.0))
                if self._left_s() > 0 and rng.random() < 0.6:
                    await self._try("backup-schedule", "delete", about)
        except GaveUpError:
            return

    def _fields(self) -> dict[str, Any]:
        rng = self._rng
        fields = {"every_s": rng.choice((300, 300, 600, 86_400)), "keep": rng.randrange(1, 4)}
        return fields | {"verify": rng.random() < 0.7}


def begin(world: World, plan: Plan) -> None:
    """Start them, on a connection that is never cut."""
    process, bus = world.process("backup users", client_role(), lambda: 0)

    async def body() -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(plan.backups):
                user = BackupUser(bus, world.observer, plan, plan.vms + number)
                group.create_task(guarded(user, world))
            for number in range(plan.schedules):
                keeper = ScheduleUser(bus, world.observer, plan, number)
                group.create_task(guarded(keeper, world))

    if plan.backups or plan.schedules:
        process.start(body)
