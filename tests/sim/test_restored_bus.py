"""A bus restored to an old backup, without a person for a day: no guest ends, no byte is lost.

Then a person adopts or purges, and only the named VMs change (ADR 0033).
"""

import asyncio
from typing import Any

import pytest
from tests.sim.bus import SimBus
from tests.sim.observer import Wanted
from tests.sim.run import running
from tests.sim.users import Plan, User
from tests.sim.world import World, client_role

from virtbus.bus.client.ports import Entry, EntryKind
from virtbus.schemas import subjects
from virtbus.schemas.quarantine import NodeQuarantined
from virtbus.schemas.wire import validate

DAY_S = 86_400.0
SETTLED_S = 120.0
STREAMS = ("KV_vm", "KV_sec", "KV_st")
pytestmark = pytest.mark.timeout(900)


class Restored:
    """Two hosts. VMs from before the backup (old), from after it (new, late) and deleted since."""

    def __init__(self, idle_s: float) -> None:
        self.idle_s = idle_s
        self.end_s = SETTLED_S + idle_s + 200.0
        self.world = World(7, nodes=2, controllers=1, shuffle=False)
        self.person, bus = self.world.process("person", client_role(), lambda: 0)
        self.bus: SimBus = bus
        plan = Plan(give_up_s=self.end_s, changes_until_s=self.end_s)
        self.user = User(bus, self.world.observer, plan, 1)
        self.vms: dict[str, Wanted] = {}
        self.failed: BaseException | None = None
        self.done = False

    async def create(self, name: str) -> None:
        wanted = self.user.new()
        wanted.name, wanted.strategy, wanted.secret, wanted.strict = name, "Always", False, False
        assert await self.user.create(wanted)
        self.vms[name] = wanted

    async def live(self) -> None:
        """Run the day; the test reports violations, not the process."""
        try:
            await self.day()
        except Exception as error:  # noqa: BLE001  raised by the test
            self.failed = error

    async def day(self) -> None:
        await asyncio.sleep(5.0)
        for name in ("old", "deleted"):
            await self.create(name)
        await asyncio.sleep(10.0)
        yesterday = self.copy()
        for name in ("new", "late"):
            await self.create(name)
        await self.user.delete(self.vms["deleted"])
        await asyncio.sleep(20.0)
        self.before = self.written(), self.runs()
        self.restore(yesterday)
        await asyncio.sleep(self.idle_s)
        self.after = self.written(), self.runs()
        await self.decide()
        self.done = True

    def copy(self) -> dict[str, list[Entry]]:
        """The store of the bus, with the join records: it is the same bus for every node.

        As in a backup, no instance of an agent is in it.
        """
        found = {}
        for stream in STREAMS:
            entries = self.world.server.shelves[stream].entries.values()
            found[stream] = [one for one in entries if not one.key.endswith("._instance")]
        return found

    def restore(self, copy: dict[str, list[Entry]]) -> None:
        """Restore the store, and let everybody list it again."""
        self.world.observer.vms.clear()  # values written from now on are older, as they must be
        for stream, entries in copy.items():
            shelf = self.world.server.shelves[stream]
            shelf.entries.clear()
            for entry in entries:
                put = entry.kind is EntryKind.PUT
                shelf.apply(entry.key, entry.value if put else None, why=entry.why)
        self.world.server.relist()

    def written(self) -> set[str]:
        """Return the uids whose guest's writes are on a host."""
        return {
            uid
            for host in self.world.hosts.values()
            for uid in (*(host.disk.overlays.keys() & host.disk.written), *host.disk.quarantine)
        }

    def runs(self) -> dict[str, int]:
        """Return the running guests' runs: the same number means the same QEMU."""
        return {
            uid: domain.run
            for host in self.world.hosts.values()
            for uid, domain in host.domains.items()
            if domain.active
        }

    def node(self, name: str) -> str:
        uid = self.vms[name].uid
        (host,) = (one for one in self.world.hosts.values() if uid in one.domains)
        return host.name

    async def ask(self, node: str, do: str, **more: Any) -> NodeQuarantined:
        subject = subjects.api("node", "quarantine")
        data = {"node": node, "do": do, **more}
        return validate(NodeQuarantined, await self.bus.request(subject, data, timeout_s=30.0))

    async def decide(self) -> None:
        """One VM is adopted while it runs, the other is ended, kept, and purged by its name."""
        new, late = self.vms["new"].uid, self.vms["late"].uid
        listed = [
            one for node in self.world.hosts for one in (await self.ask(node, "list")).entries
        ]
        assert {(one.uid, one.held) for one in listed} == {(new, True), (late, True)}
        there = self.node("late")
        assert (await self.ask(self.node("new"), "adopt", entry=new)).adopted == new
        await self.ask(there, "keep", entry=late)
        await asyncio.sleep(10.0)
        assert self.runs() == {uid: run for uid, run in self.before[1].items() if uid != late}
        assert self.written() == self.before[0]
        left = await self.ask(there, "purge", entry=late)
        assert late not in {one.uid for one in left.entries}
        assert self.written() == self.before[0] - {late}


@pytest.mark.parametrize("idle_s", [3_600.0, pytest.param(DAY_S, marks=pytest.mark.long)])
def test_a_restored_bus_ends_no_guest_and_loses_no_byte_until_a_person_decides(
    idle_s: float,
) -> None:
    here = Restored(idle_s)
    with running(here.world):
        here.world.begin()
        here.person.start(here.live)
        here.world.run_until(here.end_s)
        told = here.world.observer
        if here.failed is not None:
            raise here.failed
        assert here.done
        uids = {here.vms[name].uid for name in ("old", "new", "late")}
        assert here.before[0] == here.after[0] == uids
        assert set(here.before[1]) == uids
        assert here.before[1] == here.after[1]
        assert [one for one in told.violations if not one.startswith("I2")] == []
