"""A bus restored to before a change of a volume: one guest writes to it, and no byte is lost.

Nobody tells the bus. A second VM is refused, or gets what the record says. Then a person rebuilds,
and the holder is the one whose guest has the volume.
"""

import asyncio
from typing import Any

import pytest
from tests.sim.run import running
from tests.sim.test_restored_bus import Restored

from virtbus.bus.errors import BusError
from virtbus.schemas import subjects
from virtbus.schemas.errors import Retry, VirtbusError

IDLE_S = 120.0
MOVES = ("move", "moving")
"""The volume moves while its VM is off; the backup is from before the move, or from its begin."""
pytestmark = pytest.mark.timeout(300)


class RestoredVolume(Restored):
    """Two hosts, a VM with the volume `data`, and a change of that after the backup."""

    def __init__(self, change: str) -> None:
        super().__init__(IDLE_S)
        self.change = change
        self.refused = ""
        self.source = self.target = ""
        self.told: dict[str, Any] = {}

    async def call(self, verb: str, resource: str = "volume", **data: Any) -> Any:
        """Return the answer, after repeats that the errors ask for."""
        while True:
            try:
                return await self.bus.request(subjects.api(resource, verb), data, timeout_s=20.0)
            except VirtbusError as error:
                if error.body.retry is Retry.NEVER or error.code == 409:
                    raise
            except BusError:
                pass
            await asyncio.sleep(1.0)

    async def vm(self, name: str, *volumes: str) -> None:
        """Create a VM that names volumes."""
        wanted = self.user.new()
        wanted.name, wanted.strategy, wanted.secret, wanted.strict = name, "Always", False, False
        wanted.asked = True
        disks = [{"name": one, "volume": {"name": one}} for one in volumes]
        spec = {"run_strategy": "Always", "termination_grace_s": 5, "volumes": disks}
        spec["eviction_strategy"] = "None"  # it leaves its own disk behind
        about = {"uid": wanted.uid, "name": name, "image": "tiny"}
        await self.call("create", "vm", **about, spec=spec)
        wanted.accepted = True
        self.vms[name] = wanted

    async def day(self) -> None:
        await asyncio.sleep(5.0)
        await self.call("create", name="data", spec={"size": "64MiB"})
        await self.vm("first", *(() if self.change == "attach" else ("data",)))
        await asyncio.sleep(10.0)
        if self.change == "delete":
            await self.call("detach", name="data")
            await asyncio.sleep(10.0)
        if self.change in MOVES:
            await self.off()
        yesterday = self.copy()
        await getattr(self, self.change)()
        if self.change == "moving":
            yesterday = self.copy()
        if self.change in MOVES:
            await self.arrives()
        await asyncio.sleep(20.0)
        self.before = self.written(), self.runs()
        self.volumes = self.data()
        self.restore(yesterday)
        await asyncio.sleep(10.0)
        try:
            await self.vm("second", "data")
        except VirtbusError as error:
            self.refused = error.reason
        if self.change == "detach":  # by the record of the bus, it still has the volume
            await self.call("restart", "vm", uid=self.vms["first"].uid)
        await asyncio.sleep(self.idle_s)
        if self.change in MOVES:  # by the record of the bus, it is off, on its former node
            assert await self.start() == ""
            await asyncio.sleep(self.idle_s / 2)
            assert self.node("first") == self.target, "no second guest, with an empty disk"
        self.after = self.written(), self.runs()
        await self.call("rebuild", "bus")
        await asyncio.sleep(30.0)
        self.told = await self.call("get", name="data")
        self.done = True

    async def attach(self) -> None:
        await self.call("attach", name="data", vm="first")

    async def detach(self) -> None:
        await self.call("detach", name="data")
        await asyncio.sleep(10.0)
        await self.vm("new", "data")

    async def delete(self) -> None:
        uid = (await self.call("get", name="data"))["uid"]
        self.world.observer.volumes.delete_asked.add(uid)
        await self.call("delete", name="data")

    async def off(self) -> None:
        """Stop the VM whose volume moves."""
        await self.call("stop", "vm", uid=self.vms["first"].uid)
        await asyncio.sleep(10.0)
        self.source = (await self.call("get", name="data"))["node"]
        self.target = "n2" if self.source == "n1" else "n1"

    async def move(self) -> None:
        await self.call("move", name="data", node=self.target)

    moving = move

    async def arrives(self) -> None:
        """Start the VM on the other node, with its volume."""
        while (await self.call("get", name="data"))["node"] != self.target:
            await asyncio.sleep(1.0)
        assert await self.start() == ""

    async def start(self) -> str:
        """Start the VM; return why it is refused."""
        try:
            await self.call("start", "vm", uid=self.vms["first"].uid)
        except VirtbusError as error:
            return error.reason
        return ""

    def restore(self, copy: Any) -> None:
        self.world.observer.volumes.records.clear()
        self.world.observer.volumes._keys.clear()
        told = len(self.world.observer.violations)
        super().restore(copy)
        del self.world.observer.violations[told:]  # old records differ from what the hosts have

    def data(self) -> set[str]:
        """Return the folders of volumes on the hosts."""
        return {one for host in self.world.hosts.values() for one in host.disk.volumes}

    def has(self, name: str) -> bool:
        """Return True if the guest of the VM has the volume."""
        uid = self.vms[name].uid
        domains = [host.domains[uid] for host in self.world.hosts.values() if uid in host.domains]
        return any(bool(one.volumes) for one in domains if one.active)


@pytest.mark.parametrize("change", ["attach", "detach", "delete", *MOVES])
def test_a_bus_older_than_a_change_of_a_volume(change: str) -> None:
    here = RestoredVolume(change)
    with running(here.world):
        here.world.begin()
        here.person.start(here.live)
        here.world.run_until(here.end_s)
        if here.failed is not None:
            raise here.failed
        assert here.done
        told = here.world.observer.violations
        assert [one for one in told if not one.startswith("I2")] == []
        assert here.before[0] <= here.after[0]
        kept = {uid: run for uid, run in here.after[1].items() if uid in here.before[1]}
        assert kept == here.before[1]
        assert here.volumes <= here.data()
        holder = {"detach": "new", "delete": "second"}.get(change, "first")
        assert here.told["holder"] == here.vms[holder].uid
        if change != "delete":
            assert here.has(holder)
            refused = {"attach": {"held_on_node"}, "moving": {"volume_moving", "volume_in_use"}}
            # the restored move continues, and may have ended before the second VM asked
            assert here.refused in refused.get(change, {"volume_in_use"})
        if change in MOVES:
            assert (here.told["node"], here.node("first")) == (here.target,) * 2
