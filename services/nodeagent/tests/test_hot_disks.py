"""The agent brings the volumes of a running guest to its record, also after a kill at any step."""

import asyncio
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from services.nodeagent.tests.pretended_node import Node, eventually, in_state, record, uid

from virtbus.bus.runtime.pool_settings import LvmPool
from virtbus.nodeagent.core.addresses import assigned
from virtbus.nodeagent.core.disk_sources import disk_sources
from virtbus.nodeagent.core.metadata import disk_hashes, domain_hash
from virtbus.nodeagent.core.ports import DomainState
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.node_rpc import Ensure, ImageReady
from virtbus.schemas.pool import PoolKind
from virtbus.schemas.vm import Domain, VmRecord
from virtbus.schemas.vm_status import Condition, VmStatus
from virtbus.simulator.services import SimulatedNode

A = uid(1)
NAMES = {"data": uid(70), "more": uid(71)}


def vm(
    generation: int, *volumes: str, leaving: tuple[str, ...] = (), gib: int = 1, **more: Any
) -> VmRecord:
    """A VM with a root disk and volumes; it still holds the `leaving` ones."""
    disks = [{"name": "root"}, *({"name": name} for name in volumes)]
    content = [{"name": "root", "empty_disk": {"capacity": "1GiB"}}]
    content += [{"name": name, "volume": {"name": name}} for name in volumes]
    refs = {
        name: {"uid": NAMES[name], "namespace": "default", "name": name, "size_bytes": gib << 30}
        for name in (*volumes, *leaving)
    }
    spec = {"domain": {"devices": {"disks": disks}}, "networks": [], "volumes": content}
    return record(spec=spec, generation=generation, volume_refs=refs, **more)


class Unfilled(SimulatedNode):
    """imaged waits for the content of the volume `data`."""

    def image(self, want: Ensure) -> ImageReady:
        if any(one.name == "data" for one in want.record.spec.volumes):
            raise VirtbusError(Code.UNAVAILABLE, "volume_not_filled", "data has no content yet")
        return super().image(want)


@pytest.fixture
async def node(tmp_path: Path) -> Node:
    made = Node(tmp_path)
    await made.join()
    return made


def inside(node: Node) -> set[str]:
    """The volumes in the guest, by the names of their disks."""
    return {alias.removeprefix("ua-volume-") for alias in node.domains.plugs.there.get(A, {})}


async def told(node: Node) -> VmStatus:
    found = await node.status(A)
    assert found is not None
    return found


async def released(node: Node, *names: str) -> None:
    """Return once the status says that no guest has these volumes any more."""

    async def said() -> bool:
        found = await node.status(A)
        return found is not None and found.detached == names

    await eventually(said)


async def condition(node: Node, kind: str = "DisksPending") -> Condition | None:
    return next((one for one in (await told(node)).conditions if one.type == kind), None)


async def settled(node: Node, generation: int) -> VmStatus:
    """The status of that generation, once nothing waits."""

    async def done() -> bool:
        return (await told(node)).generation == generation and await condition(node) is None

    await eventually(done)
    assert await condition(node, "RestartRequired") is None
    return await told(node)


async def test_volumes_come_and_go_while_the_guest_runs(node: Node) -> None:
    await node.put(vm(1))
    async with node.agent():
        await eventually(in_state(node, "Running"))
        await node.put(vm(2, "data", "more"))
        await eventually(lambda: inside(node) == {"data", "more"})
        assert (await settled(node, 2)).detached == ()
        await node.put(vm(3, "more", leaving=("data",)))
        await eventually(lambda: inside(node) == {"more"})
        await released(node, "data")
        await node.put(vm(3, "more"))  # the controller has ended the hold
        assert node.domains.done.count(("start", A)) == 1
        await node.put(vm(4, "data", "more"))
        await eventually(lambda: inside(node) == {"data", "more"})
        assert (await settled(node, 4)).detached == ()


async def test_a_disk_that_the_guest_keeps_is_shown_and_asked_for_again(node: Node) -> None:
    await node.put(vm(1, "data"))
    plugs = node.domains.plugs
    plugs.busy = {"ua-volume-data"}
    async with node.agent():
        await eventually(in_state(node, "Running"))
        await node.put(vm(2, leaving=("data",)))
        said = await eventually(lambda: condition(node))
        assert (said.reason, "not released" in said.message) == ("Detaching", True)
        assert (await told(node)).detached == ()
        plugs.busy = set()
        await released(node, "data")
        assert plugs.done.count("detach") > 1
        assert await condition(node) is None


async def test_a_failed_attach_is_shown_and_repeated_with_the_latest_record(node: Node) -> None:
    await node.put(vm(1))
    plugs = node.domains.plugs
    plugs.errors["attach"] = VirtbusError(Code.INTERNAL, "libvirt_failed", "no")
    async with node.agent():
        await eventually(in_state(node, "Running"))
        await node.put(vm(2, "data"))
        said = await eventually(lambda: condition(node))
        assert (said.reason, said.message) == ("Attaching", "data: Attaching: tried again: no")
        await eventually(lambda: plugs.done.count("attach") > 1)
        before = node.domains.done.count(("limit", A))
        await node.put(vm(3, "data", "more"))
        await eventually(lambda: node.domains.done.count(("limit", A)) > before)
        assert set(node.domains.limits[A]) == {"vda"}, "the guest has no other disk"
        plugs.errors.clear()
        await eventually(lambda: inside(node) == {"data", "more"})


async def test_an_agent_that_starts_makes_the_record_true(node: Node) -> None:
    """It was killed after the record changed, and before or after each step."""
    await node.put(vm(1, "data"))
    async with node.agent():
        await eventually(in_state(node, "Running"))
    await node.put(vm(2, "more", leaving=("data",)))
    async with node.agent():
        await eventually(lambda: inside(node) == {"more"})
    async with node.agent():
        await released(node, "data")
        before = node.domains.plugs.done.count("attach")
    await node.put(vm(3, "more"))
    async with node.agent():
        await settled(node, 3)
        assert node.domains.plugs.done.count("attach") == before, "nothing is attached twice"


@pytest.mark.parametrize("step", ["note", "attach", "detach"])
async def test_an_agent_killed_in_a_step_is_followed_by_one_that_ends_it(
    node: Node, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await node.put(vm(1, "data"))
    plugs = node.domains.plugs
    reached, original = asyncio.Event(), getattr(plugs, step)

    async def stuck(*call: Any) -> None:
        await original(*call)  # libvirt does it, and the agent never learns of it
        reached.set()
        await asyncio.sleep(3600)

    async with node.agent():
        await eventually(in_state(node, "Running"))
        monkeypatch.setattr(plugs, step, stuck)
        await node.put(vm(2, "more", leaving=("data",)))
        await eventually(reached.is_set)
    monkeypatch.undo()
    async with node.agent():
        await eventually(lambda: inside(node) == {"more"})
        await eventually(reached.is_set)
        await released(node, "data")


async def test_a_stopped_guest_has_released_what_should_leave(node: Node) -> None:
    await node.put(vm(1, "data"))
    node.domains.plugs.busy = {"ua-volume-data"}
    async with node.agent():
        await eventually(in_state(node, "Running"))
        await node.put(vm(2, leaving=("data",)))
        await eventually(lambda: condition(node))
        await node.put(vm(2, leaving=("data",), powered=False, power_epoch=1))
        await eventually(in_state(node, "Stopped"))
        assert (await told(node)).detached == ("data",)


async def test_a_vm_that_waits_for_one_volume_releases_another(node: Node) -> None:
    node.services = Unfilled
    await node.put(vm(1, "data", "more"))
    async with node.agent():
        await eventually(in_state(node, "Preparing"))
        await node.put(vm(2, "data", leaving=("more",)))
        await released(node, "more")
        assert await node.state(A) == "Preparing"
        await node.put(vm(2, "data"))
        await node.put(vm(3))
        await eventually(in_state(node, "Running"))
        assert inside(node) == set()


async def test_a_volume_stays_while_libvirt_may_still_start_a_guest_with_it(node: Node) -> None:
    """An earlier agent's start is not over, and this agent prepares the next one."""
    node.services = Unfilled
    await node.put(vm(1, "data", "more"))
    async with node.agent():
        await eventually(in_state(node, "Preparing"))
        node.domains.set(A, DomainState.STARTING)
        await node.put(vm(2, "data", leaving=("more",)))
        await node.start_another()
        assert (await told(node)).detached == ()
        node.domains.set(A, DomainState.SHUT_OFF)
        await node.put(vm(3, "data", leaving=("more",)))
        await released(node, "more")


async def test_a_volume_stays_until_a_start_that_took_too_long_has_ended(node: Node) -> None:
    node.services = Unfilled
    await node.put(vm(1, "data", "more"))
    async with node.agent():
        await eventually(in_state(node, "Preparing"))
        node.domains.late.add(A)
        await node.put(vm(2, "data", leaving=("more",)))

        async def refused() -> bool:
            return "libvirt has not ended an earlier start" in (await told(node)).message

        await eventually(refused)
        assert (await told(node)).detached == ()
        node.domains.late.clear()
        await released(node, "more")


@pytest.mark.parametrize("deleted", [False, True])
async def test_a_vm_is_not_off_until_a_start_that_took_too_long_has_ended(
    node: Node, *, deleted: bool
) -> None:
    """A start that libvirt has not ended may still begin a guest, with its disks and network."""
    stuck = VirtbusError(Code.UNAVAILABLE, "libvirt_stuck", "a libvirt call took too long")
    node.domains.errors["start"] = stuck
    await node.put(vm(1, "data"))
    async with node.agent():
        await eventually(lambda: ("start", A) in node.domains.done)
        node.domains.late.add(A)
        await eventually(lambda: node.status(A))
        await node.put(vm(2, leaving=("data",), powered=False, power_epoch=1, deleting=deleted))

        async def waits() -> bool:
            return "libvirt has not ended an earlier start of this VM" in (await told(node)).message

        await eventually(waits)
        found = await told(node)
        assert (found.state, found.detached, found.released) == (
            "Deleting" if deleted else "Stopping",
            (),
            False,
        )
        node.domains.set(A, DomainState.RUNNING)
        node.domains.late.clear()

        async def over() -> bool:
            found = await told(node)
            return found.released or (found.state, found.detached) == ("Stopped", ("data",))

        await eventually(over)
        assert ("destroy", A) in node.domains.done
        assert A not in node.domains.there or not node.domains.there[A].active


async def test_disks_grow_under_a_running_guest(node: Node) -> None:
    await node.put(vm(1, "data"))
    async with node.agent():
        await eventually(in_state(node, "Running"))
        await node.put(vm(2, "data", gib=2))
        await eventually(lambda: f"grow {A} {{'vdb': {2 << 30}}}" in node.domains.plugs.done)
        assert f"grow {A} {{'vda': {1 << 30}}}" in node.domains.plugs.done


class Lagging(SimulatedNode):
    """imaged makes the volume `data` larger when the test says so."""

    made_bytes = 1 << 30

    def image(self, want: Ensure) -> ImageReady:
        ready = super().image(want)
        size = {"virtual_size_bytes": self.made_bytes}
        disks = {**ready.disks, "data": ready.disks["data"].model_copy(update=size)}
        return ready.model_copy(update={"disks": disks})


async def test_a_guest_sees_a_larger_logical_volume_when_imaged_has_cleared_its_new_part(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    def logical(generation: int, gib: int) -> VmRecord:
        made = vm(generation, "data", gib=gib)
        ref = made.volume_refs["data"].model_copy(update={"pool": "vg", "kind": PoolKind.LVM})
        return made.model_copy(update={"volume_refs": {"data": ref}})

    pools = {"vg": LvmPool.model_validate({"kind": PoolKind.LVM, "group": "vg0"})}
    found = partial(disk_sources, pools=pools)
    monkeypatch.setattr("virtbus.simulator.memory_files.disk_sources", found)
    node.services = Lagging
    await node.put(logical(1, gib=1))
    async with node.agent():
        await eventually(in_state(node, "Running"))
        await node.put(logical(2, gib=2))

        async def waits() -> bool:
            return "as large as its record says" in str((await told(node)).conditions)

        await eventually(waits)
        grown = f"grow {A} {{'vdb': {2 << 30}}}"
        assert grown not in node.domains.plugs.done
        monkeypatch.setattr(Lagging, "made_bytes", 2 << 30)
        await node.put(logical(3, gib=2))
        await eventually(lambda: grown in node.domains.plugs.done)


async def test_addresses_survive_a_restart_of_the_guest_and_of_the_agent(node: Node) -> None:
    def addresses() -> dict[str, str]:
        found = {}
        for alias, text in node.domains.plugs.there[A].items():
            address = ET.fromstring(text).find("address")
            assert address is not None
            found[alias.removeprefix("ua-volume-")] = address.get("bus", "")
        return found

    await node.put(vm(1, "data"))
    async with node.agent():
        await eventually(in_state(node, "Running"))
        await node.put(vm(2, "data", "more"))
        await eventually(lambda: len(inside(node)) == 2)
        first = addresses()
        await node.put(vm(3, "more", leaving=("data",)))
        await eventually(lambda: inside(node) == {"more"})
    async with node.agent():
        await node.put(vm(4, "more", powered=False, power_epoch=1))
        await eventually(in_state(node, "Stopped"))
        await node.put(vm(4, "more", power_epoch=2))
        await eventually(in_state(node, "Running"))
        assert addresses() == {"more": first["more"]}


def test_a_device_keeps_its_number_and_a_new_one_takes_the_lowest_that_is_free() -> None:
    def spec(*names: str, nics: int = 1) -> Domain:
        disks = [{"name": name} for name in names]
        plain = {
            "devices": {"disks": disks, "interfaces": [{"name": f"n{n}"} for n in range(nics)]}
        }
        return Domain.model_validate(plain)

    first = assigned(spec("a", "b", "c"))
    assert first["port"] == {
        "disk/a": 2,
        "disk/b": 3,
        "disk/c": 4,
        "serial": 5,
        "balloon": 6,
        "rng": 7,
    }
    assert first["vd"] == {"a": 0, "b": 1, "c": 2}
    after = assigned(spec("a", "c"), first)
    assert after["vd"] == {"a": 0, "c": 2}
    again = assigned(spec("a", "c", "d"), after, busy={1, 3})
    assert (again["vd"]["d"], again["port"]["disk/d"]) == (1, 8)
    beside = assigned(spec("a", "c", "d", nics=2), after, busy={1, 3})
    assert beside == again, "a NIC that was plugged in moves no device of the running guest"
    leaves = assigned(spec("a", "d"), first, leaving={"c"})
    assert leaves["vd"] == {"a": 0, "c": 2, "d": 3}
    moved = assigned(spec("a", nics=2), first)
    assert moved["port"]["disk/a"] == 8, "the first ports are those of NICs"


def test_a_sata_controller_stays_while_a_disk_is_on_it() -> None:
    def spec(*names: int) -> Domain:
        disks = [{"name": f"s{name}", "bus": "sata"} for name in names]
        return Domain.model_validate({"devices": {"disks": disks}})

    first = assigned(spec(*range(7)))
    assert first["port"]["sata1"] == 1
    assert assigned(spec(*range(1, 7)), first)["port"]["sata1"] == 1
    assert "sata1" not in assigned(spec(*range(6)), first)["port"]


def test_only_properties_of_a_volume_disk_need_a_restart() -> None:
    without, with_data = vm(1), vm(1, "data")
    assert domain_hash(without) == domain_hash(with_data)
    plain = with_data.model_dump()
    plain["spec"]["domain"]["devices"]["disks"][1]["cache"] = "none"
    assert disk_hashes(VmRecord.model_validate(plain)) != disk_hashes(with_data)
