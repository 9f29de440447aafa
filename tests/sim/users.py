"""Users: each runs a VM's life over the public API, and repeats requests until an answer."""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.sim.bus import SimBus
from tests.sim.observer import Observer, Wanted
from tests.sim.world import World, client_role

from virtbus.bus.errors import BusError
from virtbus.schemas import subjects
from virtbus.schemas.errors import Code, Retry, VirtbusError

USER_DATA = "#cloud-config\npassword: a-canary\n"
STRATEGIES = ("Always", "Always", "Always", "RerunOnFailure", "Manual", "Halted")
TIMEOUT_S = 8.0
PAUSE_S = (0.3, 2.0)
USES_VOLUME = 0.25
MAKES_VOLUME = 0.3
USES_IMAGE_NAME = 0.5
USES_NETWORK = 0.6
APPS = ("web", "db", "lb")
"""Values of the label that security groups select."""
POOL = 5
"""Addresses of a network that claims them; few, so that they are used again."""
EXPLAINED = frozenset(
    {
        *("name_taken", "deleting", "volume_in_use", "volume_not_found", "not_its_uid", "invalid"),
        *("vm_not_found", "not_off", "disk_name_taken", "volume_elsewhere", "unplaced"),
        *("volume_empty", "volume_lost", "volume_not_filled", "volume_filled", "not_copied"),
        *("no_node", "uid_taken", "deleted", "operation_quota", "vm_runs", "no_disk"),
        *("detaching", "volume_moving", "volume_exists", "no_pool", "snapshot_not_found"),
        *("snapshot_not_ready", "snapshot_in_use", "snapshot_elsewhere", "source_gone"),
        *("several_holders", "cannot_grow", "volume_shared", "no_copies", "no_snapshots"),
        "not_its_holder",
        *("local_disks", "operation_open", "no_capacity"),
    }
)
"""Refusals of requests about volumes after which a user tries something else."""
UNEXPORTED = frozenset(
    {"vm_runs", "unplaced", "deleting", "no_disk", "vm_not_found", "operation_ended"}
)
"""Refusals of exports and cancels that other changes explain."""
SHARES = 0.25
"""The probability that a volume is shared."""
RIVALS = 0.3
"""The probability that another user changes the VM at the same time."""


@dataclass
class Plan:
    """The actions of a seed's users, and their end."""

    vms: int = 20
    volumes: int = 0
    image_names: int = 0
    networks: int = 0
    groups: int = 0
    backups: int = 0
    schedules: int = 0
    exports: bool = False
    """True: users export disks, and cancel some of the exports."""
    deletes: float = 0.6
    """The probability that a VM is deleted after its changes."""
    begin_s: float = 2.0
    creates_until_s: float = 120.0
    changes_until_s: float = 200.0
    operates_until_s: float = 140.0
    """Nobody cordons or fences a node after this; running actions take a minute at most."""
    give_up_s: float = 240.0


class GaveUpError(Exception):
    """There was no answer until the end; the outcome is unknown."""


class User:
    """The life of one VM slot: a VM, changes, then possibly a delete and another VM of its name."""

    def __init__(self, bus: SimBus, observer: Observer, plan: Plan, number: int) -> None:
        self._bus = bus
        self._observer = observer
        self._plan = plan
        self._number = number
        self._rng: random.Random = bus.server.rng
        self._loop = bus.server.loop
        self.group: asyncio.TaskGroup | None = None
        """The place for rivals; without one there are none."""

    def _left_s(self) -> float:
        return self._plan.changes_until_s - self._loop.time()

    async def run(self) -> None:
        """Run from the first create to the last change; ends by itself."""
        plan, rng = self._plan, self._rng
        await asyncio.sleep(rng.uniform(plan.begin_s, plan.creates_until_s))
        while self._left_s() > 0:
            wanted = self.new()
            try:
                if await self.create(wanted):
                    await self._live(wanted)
            except GaveUpError:
                wanted.in_doubt = True
                return
            if not wanted.delete_accepted or rng.random() < 0.5:
                return

    def new(self) -> Wanted:
        wanted = Wanted(
            uid=self._bus.sources.uuid7(),
            name=f"vm-{self._number}",
            strategy=self._rng.choice(STRATEGIES),
            secret=self._rng.random() < 0.3,
            strict=self._rng.random() < 0.3,
        )
        self._observer.wanted[wanted.uid] = wanted
        return wanted

    # --- requests -------------------------------------------------------------------------
    async def _ask(self, verb: str, data: dict[str, Any], resource: str = "vm") -> Any:
        """Return the answer after any number of attempts; VirtbusError for a permanent refusal."""
        once = self._bus.sources.uuid7()
        subject = subjects.api(resource, verb)
        while self._loop.time() < self._plan.give_up_s:
            try:
                return await self._bus.request(subject, data, timeout_s=TIMEOUT_S, request_id=once)
            except BusError as error:
                self._observer.note("user", self._number, verb, "again", type(error).__name__)
            except VirtbusError as error:
                self._observer.note("user", self._number, verb, "refused", error.reason)
                if error.body.retry is Retry.NEVER:
                    raise
            await asyncio.sleep(self._rng.uniform(*PAUSE_S))
        raise GaveUpError

    async def create(self, wanted: Wanted) -> bool:
        """Return True once it is accepted; False if it is refused."""
        wanted.asked = True
        data = self._data(wanted)
        while True:
            try:
                answer = await self._ask("create", data)
            except VirtbusError as error:
                wanted.refused = error.reason
                if error.reason != "deleting" or self._left_s() < 0:
                    return False
                await asyncio.sleep(2.0)
                continue
            self._accepted(wanted, answer["vm"])
            self._observer.note("user", self._number, "has", wanted.uid)
            return True

    def _data(self, wanted: Wanted) -> dict[str, Any]:
        """Return the request of a create, with objects that other users change."""
        data: dict[str, Any] = {
            "uid": wanted.uid,
            "name": wanted.name,
            "image": "tiny",
            "spec": {"run_strategy": wanted.strategy, "termination_grace_s": 5},
        }
        if wanted.strict:
            data["spec"]["placement"] = {"overcommit": "strict"}
        if self._plan.volumes and self._rng.random() < USES_VOLUME:
            name = f"vol-{self._rng.randrange(self._plan.volumes)}"
            data["spec"]["volumes"] = [{"name": "data", "volume": {"name": name}}]
        if self._plan.volumes and (own := _own_volume(wanted.uid, self._number)):
            data["spec"].setdefault("volumes", []).append(own)
        if "volumes" in data["spec"] and int(wanted.uid[-1], 16) % 2:
            data["spec"]["eviction_strategy"] = "None"  # it may leave its own disk behind
        if self._plan.image_names and self._rng.random() < USES_IMAGE_NAME:
            data["image"] = f"name-{self._rng.randrange(self._plan.image_names)}"
        if self._plan.networks and self._rng.random() < USES_NETWORK:
            number = self._rng.randrange(self._plan.networks)
            nic = {"name": "lan", "addresses": self._addresses(number)}
            data["spec"] |= {
                "networks": [{"name": "lan", "network": f"net-{number}"}],
                "domain": {"devices": {"interfaces": [nic]}},
            }
        data["labels"] = self._labels()
        if wanted.secret:
            data["user_data"] = USER_DATA
        return data

    def _labels(self) -> dict[str, str]:
        """Return the label that decides about the VM's security groups."""
        return {"app": self._rng.choice(APPS)} if self._plan.groups else {}

    def _addresses(self, network: int) -> list[str]:
        """Return an address that other users want, too; or none: the network chooses one."""
        if network % 2 == 0 or self._rng.random() < 0.5:
            return []
        return [f"10.9.{network}.{self._rng.randrange(10, 10 + POOL)}"]

    def _accepted(self, wanted: Wanted, view: dict[str, Any]) -> None:
        wanted.accepted = True
        wanted.generation = max(wanted.generation, view.get("generation", 1))
        wanted.powered = view.get("powered", True)
        wanted.paused = view.get("paused") if wanted.powered else None

    # --- one life -------------------------------------------------------------------------
    async def _live(self, wanted: Wanted) -> None:
        rng = self._rng
        steps: list[Callable[[Wanted], Any]] = [
            *(self.stop, self.start, self.update, self.move),
            *(self.restart, self.pause, self.unpause, self.press),
            *((self.export,) * 4 if self._plan.exports else ()),
        ]
        for _ in range(rng.randrange(0, 4)):
            await asyncio.sleep(rng.uniform(0.0, 25.0))
            if self._left_s() < 0:
                return
            await rng.choice(steps)(wanted)
            if self._plan.volumes:
                await self._carry(wanted)
        await asyncio.sleep(rng.uniform(0.0, 30.0))
        if self._left_s() > 0 and rng.random() < self._plan.deletes:
            await self.delete(wanted)

    async def _change(self, wanted: Wanted, verb: str, **more: Any) -> Any:
        wanted.in_doubt = True
        if self.group is not None and self._rng.random() < RIVALS:
            self.group.create_task(self._label(wanted))
        answer = await self._ask(verb, {"uid": wanted.uid, **more})
        wanted.in_doubt = False
        self._observer.note("user", self._number, verb, wanted.uid)
        return answer

    async def _label(self, wanted: Wanted) -> None:
        """Another user labels the VM at the same time; the loser of the race gives up."""
        subject = subjects.api("vm", "get")
        try:
            view = await self._bus.request(subject, {"uid": wanted.uid}, timeout_s=TIMEOUT_S)
            data = {
                "uid": wanted.uid,
                "revision": view["revision"],
                "labels": {"seen": str(self._rng.randrange(100)), **self._labels()},
            }
            await self._bus.request(subjects.api("vm", "update"), data, timeout_s=TIMEOUT_S)
        except (BusError, VirtbusError) as error:
            self._observer.note("rival", self._number, str(error)[:40])

    async def stop(self, wanted: Wanted) -> None:
        self._accepted(
            wanted, await self._change(wanted, "stop", grace_s=self._rng.choice((0, 1, 4)))
        )

    async def start(self, wanted: Wanted) -> None:
        paused = self._rng.choice((None, None, True, False))
        await self._guest(wanted, "start", paused=paused)

    async def restart(self, wanted: Wanted) -> None:
        await self._guest(wanted, "restart", grace_s=self._rng.choice((0, 1, 4)))

    async def pause(self, wanted: Wanted) -> None:
        await self._guest(wanted, "pause")

    async def unpause(self, wanted: Wanted) -> None:
        await self._guest(wanted, "unpause")

    async def press(self, wanted: Wanted) -> None:
        """Reset or reboot the current guest, once."""
        view = await self._ask("get", {"uid": wanted.uid})
        wanted.presses += 1
        data = {"uid": wanted.uid, "epoch": view["epoch"]}
        try:
            await self._ask(self._rng.choice(("reset", "soft-reboot")), data)
        except VirtbusError as error:
            if error.reason not in {"not_running", "paused", "moved", "outcome_unknown"}:
                raise

    async def _guest(self, wanted: Wanted, verb: str, **more: Any) -> None:
        """A verb that needs a guest, or none: a refusal changes nothing."""
        try:
            self._accepted(wanted, await self._change(wanted, verb, **more))
        except VirtbusError as error:
            if error.reason not in {"not_running", "running", "volume_moving"}:
                raise
            wanted.in_doubt = False

    async def update(self, wanted: Wanted) -> None:
        """Read, change, write; after a lost race read again."""
        for _ in range(5):
            view = await self._ask("get", {"uid": wanted.uid})
            spec = dict(view["spec"])
            spec["termination_grace_s"] = self._rng.randrange(1, 9)
            try:
                answer = await self._change(wanted, "update", revision=view["revision"], spec=spec)
            except VirtbusError as error:
                wanted.in_doubt = False
                if error.code == Code.CONFLICT:
                    continue
                raise
            self._accepted(wanted, answer)
            return

    async def move(self, wanted: Wanted) -> None:
        """Move it off its node and lose its disks; a refusal leaves it in place."""
        try:
            await self._change(wanted, "move", discard_local_disks=True)
        except VirtbusError as error:
            wanted.in_doubt = False
            self._observer.note("user", self._number, "not moved", error.reason)

    async def export(self, wanted: Wanted) -> None:
        """Stop the VM, and export its disk; possibly cancel that, or start the VM meanwhile."""
        rng = self._rng
        await self.stop(wanted)
        await asyncio.sleep(rng.uniform(0.0, 8.0))
        asked = {"vm": wanted.name, "id": self._bus.sources.uuid7()}
        try:
            await self._ask("export", asked, "operation")
            await asyncio.sleep(rng.uniform(0.0, 12.0))
            if rng.random() < 0.4:
                await self._ask("cancel", {"id": asked["id"]}, "operation")
        except VirtbusError as error:
            if error.reason not in UNEXPORTED:
                raise
        if rng.random() < 0.5:
            await self.start(wanted)

    async def _carry(self, wanted: Wanted) -> None:
        """Stop the VM, and move its volumes; possibly start it meanwhile, or give the move up.

        It draws from a generator of its own, so that earlier seeds keep their users.
        """
        rng = random.Random(f"{wanted.uid} {self._loop.time()} carry")
        view = await self._ask("get", {"uid": wanted.uid})
        named = [one["volume"]["name"] for one in view["spec"]["volumes"] if one.get("volume")]
        if not named or rng.random() < 0.5 or self._left_s() < 0:
            return
        await self.stop(wanted)
        await asyncio.sleep(rng.uniform(0.0, 8.0))
        goals = [f"n{rng.randrange(1, 4)}" for _ in range(rng.choice((1, 1, 2)))]
        for goal in goals:
            try:
                await self._ask("move", {"name": rng.choice(named), "node": goal}, "volume")
            except VirtbusError as error:
                if error.reason not in EXPLAINED:
                    raise
            await asyncio.sleep(rng.uniform(0.0, 25.0))
            if rng.random() < 0.5:
                await self.start(wanted)

    async def delete(self, wanted: Wanted) -> None:
        wanted.delete_asked = True
        try:
            await self._change(wanted, "delete", grace_s=self._rng.choice((0, 0, 2)))
        except VirtbusError as error:
            if error.code != Code.NOT_FOUND:
                raise
            wanted.in_doubt = False  # an earlier attempt of ours had succeeded
        wanted.delete_accepted = True


def _own_volume(uid: str, number: int) -> dict[str, Any] | None:
    """Return a volume that the VM's create makes, or None; the next VM of this slot may find it.

    It draws from a generator of its own, so that earlier seeds keep their users.
    """
    rng = random.Random(f"{uid} own volume")
    if rng.random() > MAKES_VOLUME:
        return None
    source = rng.choice(({}, {}, {"image": "tiny"}, {"image": "tiny", "full": True}))
    spec = {"size": "64MiB", "source": source, "retention": rng.choice(("Retain", "Delete"))}
    return {"name": "own", "volume": {"name": f"own-{number}", "template": spec}}


class VolumeUser(User):
    """The life of one volume name: a volume, growth, other VMs, a delete, then another volume."""

    async def run(self) -> None:
        """Run until the users make no more changes."""
        rng, about = self._rng, {"name": f"vol-{self._number}"}
        await asyncio.sleep(rng.uniform(0.0, self._plan.creates_until_s / 4))
        try:
            while self._left_s() > 0:
                spec = self._spec()
                await self._try("create", about | {"uid": self._bus.sources.uuid7(), "spec": spec})
                await asyncio.sleep(rng.uniform(5.0, 60.0))
                if rng.random() < 0.3:
                    await self._try("update", about | {"size": "128MiB"})
                if rng.random() < 0.5:
                    await self._try("detach", about)
                if rng.random() < 0.5:
                    await self._try("attach", about | {"vm": f"vm-{rng.randrange(self._plan.vms)}"})
                await self._try("fill", about)
                if spec.get("access"):
                    await self._share(about)
                await self._snapshot(about)
                await self._move(about)
                if rng.random() < 0.6:
                    await self._delete(about)
        except GaveUpError:
            return

    async def _share(self, about: dict[str, Any]) -> None:
        """Give the volume to several VMs, and take it from some."""
        rng = random.Random(f"{self._number} {self._loop.time()} share")
        for _ in range(rng.randrange(5)):
            vm = {"vm": f"vm-{rng.randrange(self._plan.vms)}"}
            await self._try(rng.choice(("attach", "attach", "detach")), about | vm)
            await asyncio.sleep(rng.uniform(0.0, 15.0))

    async def _move(self, about: dict[str, Any]) -> None:
        """Move the volume to another node, and possibly change that meanwhile.

        It draws from a generator of its own, so that earlier seeds keep their users.
        """
        rng = random.Random(f"{self._number} {self._loop.time()} move")
        for _ in range(rng.choice((0, 0, 1, 2))):
            if rng.random() < 0.7:
                await self._try("detach", about)
            await self._try("move", about | {"node": f"n{rng.randrange(1, 4)}"})
            await asyncio.sleep(rng.uniform(0.0, 30.0))

    async def _snapshot(self, about: dict[str, Any]) -> None:
        """Make a snapshot of the volume, put it in its place, and delete snapshots."""
        rng = random.Random(f"{self._number} {self._loop.time()} snapshot")
        one, kept = f"snap-{self._number}", f"kept-{self._number}"
        view = await self._try("get", about)
        if view is None or view.get("holder") or not view.get("node"):
            return
        await self._try("create", {"name": one, "volume": about["name"]}, "snapshot")
        await asyncio.sleep(rng.uniform(0.0, 30.0))
        if rng.random() < 0.8:
            await self._try("restore", {"name": one, "keep": kept}, "snapshot")
            await asyncio.sleep(rng.uniform(0.0, 25.0))
        for name in (one, kept):
            if rng.random() < 0.6:
                await self._try("delete", {"name": name}, "snapshot")

    def _spec(self) -> dict[str, Any]:
        """Return an empty volume, or a copy of an image, a volume or a VM's disk."""
        other = f"vol-{self._rng.randrange(self._plan.volumes)}"
        sources: list[dict[str, Any]] = [{}, {"image": "tiny", "full": True}, {"volume": other}]
        sources.append({"vm": f"vm-{self._rng.randrange(self._plan.vms)}"})
        source = self._rng.choices(sources, (4, 3, 2, 2))[0]
        if random.Random(f"{self._number} {self._loop.time()} access").random() < SHARES:
            return {"size": "64MiB", "access": "shared"}
        return {"size": 0 if {"volume", "vm"} & source.keys() else "64MiB", "source": source}

    async def _delete(self, about: dict[str, Any]) -> None:
        while self._left_s() > 0:
            view = await self._try("get", about)
            if view is None:
                return
            self._observer.volumes.delete_asked.add(view["uid"])
            if await self._try("delete", about | {"uid": view["uid"]}) is not None:
                return
            await asyncio.sleep(self._rng.uniform(2.0, 15.0))

    async def _try(self, verb: str, data: dict[str, Any], resource: str = "volume") -> Any:
        """Return the answer, None after a refusal that another user's action explains."""
        try:
            return await self._ask(verb, data, resource)
        except VirtbusError as error:
            if error.reason not in EXPLAINED:
                raise
            return None


class ImageNameUser(User):
    """The life of one image name: it is set, changed, deleted and set again."""

    async def run(self) -> None:
        """Run until the users make no more changes."""
        rng, about = self._rng, {"name": f"name-{self._number}"}
        try:
            while self._left_s() > 0:
                spec = {"url": f"https://images.example/{rng.randrange(100)}"}
                await self._ask("set", about | {"spec": spec}, "imagename")
                await asyncio.sleep(rng.uniform(1.0, 20.0))
                if rng.random() < 0.2:
                    await self._delete(about)
        except GaveUpError:
            return

    async def _delete(self, about: dict[str, Any]) -> None:
        try:
            await self._ask("delete", about, "imagename")
        except VirtbusError as error:
            if error.code != Code.NOT_FOUND:  # an earlier attempt of ours had succeeded
                raise


class NetworkUser(User):
    """The life of one network: it is made, changed, deleted and made again."""

    async def run(self) -> None:
        """Run until the users make no more changes."""
        rng, about = self._rng, {"name": f"net-{self._number}"}
        spec: dict[str, Any] = {"kind": "isolated", "subnet": f"10.9.{self._number}.0/24"}
        if self._number:
            ranges = [f"10.9.{self._number}.10-10.9.{self._number}.{9 + POOL}"]
            spec |= {"pool": "fleet", "ranges": ranges}
        try:
            while self._left_s() > 0:
                await self._try("create", about | {"spec": spec})
                await asyncio.sleep(rng.uniform(1.0, 20.0))
                if rng.random() < 0.3:
                    await self._try("update", about | {"mtu": rng.randrange(1280, 1500)})
                if rng.random() < 0.6:
                    await self._try("delete", about)
        except GaveUpError:
            return

    async def _try(self, verb: str, data: dict[str, Any]) -> None:
        """Ask; a refusal by a VM's use, by a delete or by an earlier attempt changes nothing."""
        try:
            await self._ask(verb, data, "network")
        except VirtbusError as error:
            if error.reason not in {
                "network_in_use",
                "network_not_found",
                "deleting",
                "name_taken",
            }:
                raise


class GroupUser(User):
    """The life of one security group: it is made, changed, deleted and made again."""

    async def run(self) -> None:
        """Run until the users make no more changes."""
        rng, about = self._rng, {"name": f"group-{self._number}"}
        try:
            while self._left_s() > 0:
                await self._try("create", about | {"spec": self._spec()})
                await asyncio.sleep(rng.uniform(1.0, 20.0))
                for _ in range(rng.randrange(3)):
                    await self._try("update", about | {"spec": self._spec()})
                    await asyncio.sleep(rng.uniform(0.0, 10.0))
                if rng.random() < 0.4:
                    await self._try("delete", about)
        except GaveUpError:
            return

    def _spec(self) -> dict[str, Any]:
        """Return a selector, and a rule that may name another group."""
        rng = self._rng
        rule: dict[str, Any] = {"direction": "ingress", "protocol": "tcp"}
        rule["ports"] = [str(rng.randrange(1, 1000))]
        if rng.random() < 0.7:
            rule["groups"] = [f"group-{rng.randrange(self._plan.groups)}"]
        return {"selector": {"labels": {"app": rng.choice(APPS)}}, "rules": [rule]}

    async def _try(self, verb: str, data: dict[str, Any]) -> None:
        """Ask; a refusal that an earlier attempt explains changes nothing."""
        try:
            await self._ask(verb, data, "security-group")
        except VirtbusError as error:
            if error.reason not in {"security_group_not_found", "name_taken", "deleted"}:
                raise


def begin(world: World, plan: Plan) -> None:
    """Start the users, all on one connection that is never cut."""
    process, bus = world.process("users", client_role(), lambda: 0)

    async def body() -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(plan.vms):
                user = User(bus, world.observer, plan, number)
                user.group = group
                group.create_task(guarded(user, world))
            for number in range(plan.volumes):
                owner = VolumeUser(bus, world.observer, plan, number)
                group.create_task(guarded(owner, world))
            for number in range(plan.image_names):
                namer = ImageNameUser(bus, world.observer, plan, number)
                group.create_task(guarded(namer, world))
            for number in range(plan.networks):
                admin = NetworkUser(bus, world.observer, plan, number)
                group.create_task(guarded(admin, world))
            for number in range(plan.groups):
                keeper = GroupUser(bus, world.observer, plan, number)
                group.create_task(guarded(keeper, world))

    process.start(body)


async def guarded(user: User, world: World) -> None:
    """A refusal that no user could understand is a defect of the system."""
    try:
        await user.run()
    except VirtbusError as error:
        world.observer.wrong("I2", f"user {user._number} is refused: {error.reason}: {error}")
