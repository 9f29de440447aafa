"""Bridges of Kubernetes clusters: each sees and changes only the VMs of its account (M3)."""

import asyncio
from typing import Any

import pytest
from services.controller.tests.fleets import GIB, node, record, spec, uid
from services.controller.tests.virtual import World, run, settle, world

from virtbus.bus.client.memory_bus import MemoryBus
from virtbus.bus.client.memory_link import MemoryLink
from virtbus.controller.core.demand import HOSTNAME, demand_of_vm
from virtbus.controller.core.fleet import Fleet
from virtbus.controller.core.placement import (
    CPU_OVERCOMMIT,
    MEMORY_RESERVE_BYTES,
    Candidate,
    place,
)
from virtbus.controller.core.snapshot_changes import refuse_devices
from virtbus.controller.core.vm_keys import StoredVm
from virtbus.schemas import subjects
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.ids import UNPLACED
from virtbus.schemas.vm import VmSpec, Volume
from virtbus.schemas.volume_ref import HostDevice
from virtbus.schemas.wire import encode


class Asking:
    """A connection of an account."""

    def __init__(self, made: World, account: str) -> None:
        link = MemoryLink(made.server, account)
        self.bus = MemoryBus(made.server, account.lower(), link=link)

    async def ask(self, verb: str, **data: Any) -> Any:
        return await self.bus.request(subjects.api("vm", verb), data, timeout_s=10)

    async def refused(self, verb: str, **data: Any) -> str:
        with pytest.raises(VirtbusError) as caught:
            await self.ask(verb, **data)
        return caught.value.reason

    async def listed(self) -> list[str]:
        return [item["name"] for item in (await self.ask("list")).get("items", ())]

    async def watched(self) -> list[str]:
        subject = subjects.api("vm", "watch")
        async with self.bus.request_stream(subject, {}, idle_timeout_s=60) as replies:
            async for reply in replies:
                if reply.get("items"):
                    return [item["name"] for item in reply["items"]]
                if reply.get("synced"):
                    return []
        return []


VERBS: dict[str, dict[str, Any]] = {
    "get": {},
    "delete": {},
    "start": {},
    "stop": {},
    "restart": {},
    "pause": {},
    "unpause": {},
    "reset": {},
    "soft-reboot": {},
    "freeze": {},
    "thaw": {},
    "move": {},
    "update": {"revision": 1, "labels": {"mine": "now"}},
}


def test_a_bridge_touches_the_vms_that_it_made_and_no_others() -> None:
    async def body() -> None:
        async with world() as made:
            people, east, west = (
                Asking(made, account) for account in ("CLIENT", "BRIDGE", "BRIDGE-WEST")
            )
            for number, (one, name) in enumerate(
                ((people, "by-hand"), (east, "of-east"), (west, "of-west")), start=1
            ):
                await one.ask("create", name=name, image="tiny", uid=uid(number))
            await settle()
            for verb, more in VERBS.items():
                for number in (1, 3):
                    assert await east.refused(verb, uid=uid(number), **more) == "not_owner"
            assert await east.refused("get", name="of-west") == "not_owner"
            stored = [await made.stored(uid(number)) for number in (1, 2, 3)]
            assert [one.owner for one in stored if one] == ["", "bridge", "bridge-west"]
            assert all(one is not None and not one.deleting for one in stored)
            assert (await east.listed(), await west.listed()) == (["of-east"], ["of-west"])
            assert (await east.watched(), await west.watched()) == (["of-east"], ["of-west"])
            assert await people.listed() == ["by-hand", "of-east", "of-west"]
            assert (await east.ask("delete", uid=uid(2)))["deleting"]
            assert (await people.ask("delete", uid=uid(3)))["owner"] == "bridge-west"

    run(body)


def test_a_request_cannot_choose_a_vms_owner_or_take_over_its_uid() -> None:
    async def body() -> None:
        async with world() as made:
            people, east = Asking(made, "CLIENT"), Asking(made, "BRIDGE")
            vm = {"name": "web", "image": "tiny", "uid": uid(1)}
            await people.ask("create", **vm)
            assert await east.refused("create", **vm) == "not_owner"
            forged = {"name": "b", "image": "tiny", "uid": uid(2), "owner": "bridge-west"}
            assert await east.refused("create", **forged) == "invalid"
            stored = await made.stored(uid(1))
            assert stored is not None
            assert stored.owner == ""

    run(body)


def test_an_unknown_account_owns_nothing() -> None:
    async def body() -> None:
        async with world() as made:
            await Asking(made, "CLIENT").ask("create", name="web", image="tiny", uid=uid(1))
            await settle()
            assert await Asking(made, "node-n1").refused("delete", uid=uid(1)) == "not_owner"
            assert await Asking(made, "node-n1").listed() == []

    run(body)


def test_only_a_container_runtime_gives_a_vm_a_device_of_its_node() -> None:
    async def body() -> None:
        async with world() as made:
            request = {
                "name": "pod",
                "image": "tiny",
                "uid": uid(1),
                "spec": {
                    "run_strategy": "Manual",
                    "node_selector": {"kubernetes.io/hostname": "n1"},
                    "volumes": [{"name": "data", "host_device": {"path": "/dev/loop0"}}],
                },
            }
            for account in ("CLIENT", "bridge-east"):
                assert await Asking(made, account).refused("create", **request) == "device_denied"
            for path in ("/dev/../etc/shadow", "/etc/shadow", "/dev/.x", "/dev/a b"):
                spec = {"volumes": [{"name": "data", "host_device": {"path": path}}]}
                wrong = request | {"spec": spec}
                assert await Asking(made, "CRI-N1").refused("create", **wrong) == "invalid"
            await Asking(made, "CRI-N1").ask("create", **request)
            assert await made.stored(uid(1)) is not None

    run(body)


def test_a_device_of_a_node_has_no_snapshots() -> None:
    volume = Volume(name="data", host_device=HostDevice(path="/dev/loop0"))
    with pytest.raises(VirtbusError, match="no snapshots"):
        refuse_devices(VmSpec(volumes=(volume,)))


def test_a_container_runtime_creates_vms_on_its_own_node_only() -> None:
    async def body() -> None:
        async with world() as made:
            runtime = Asking(made, "CRI-N1")
            spec = {"run_strategy": "Manual"}
            here = spec | {"node_selector": {"kubernetes.io/hostname": "n1"}}
            there = spec | {"node_selector": {"kubernetes.io/hostname": "n2"}}
            for wrong in (spec, there):
                request = {"name": "pod", "image": "tiny", "uid": uid(1), "spec": wrong}
                assert await runtime.refused("create", **request) == "not_its_node"
            await runtime.ask("create", name="pod", image="tiny", uid=uid(1), spec=here)
            stored = await made.stored(uid(1))
            assert stored is not None
            assert stored.owner == "cri-n1"
            with pytest.raises(VirtbusError, match="of n1 work for n1 only"):
                await runtime.bus.request(
                    subjects.api("image", "pull"), {"ref": "tiny", "node": "n2"}, timeout_s=10
                )

    run(body)


def test_the_vm_of_a_pod_is_never_refused_room_that_kubelet_granted() -> None:
    async def body() -> None:
        async with world() as made:
            here = {"kubernetes.io/hostname": "n1"}
            large = {"cpu": {"cores": 200}, "memory": {"guest": 4 * 1024**4}}
            spec = {"run_strategy": "Manual", "node_selector": here, "domain": large}
            request = {"name": "pod", "image": "tiny", "uid": uid(1), "spec": spec}
            assert await Asking(made, "CLIENT").refused("create", **request) == "no_capacity"
            runtime = Asking(made, "CRI-N1")
            await runtime.ask("create", **request)
            await runtime.ask("start", uid=uid(1))
            stored = await made.stored(uid(1))
            assert stored is not None
            assert (stored.node, stored.powered) == ("n1", True)

    run(body)


def test_the_vm_of_a_pod_stays_on_the_node_of_its_runtime() -> None:
    async def body() -> None:
        async with world(nodes=2) as made:
            runtime = Asking(made, "CRI-N1")
            here = {"kubernetes.io/hostname": "n1"}
            spec = {"run_strategy": "Manual", "node_selector": here}
            await runtime.ask("create", name="pod", image="tiny", uid=uid(1), spec=spec)
            view = await runtime.ask("get", uid=uid(1))
            for selector in ({}, {"kubernetes.io/hostname": "n2"}):
                changed = view["spec"] | {"node_selector": selector, "eviction_strategy": "None"}
                asked = {"uid": uid(1), "revision": view["revision"], "spec": changed}
                assert await runtime.refused("update", **asked) == "not_its_node"
            changed = view["spec"] | {"eviction_strategy": "None"}
            await runtime.ask("update", uid=uid(1), revision=view["revision"], spec=changed)
            people = Asking(made, "CLIENT")
            assert await people.refused("move", uid=uid(1), to="n2") == "volumes_stay"
            await made.ask("drain", "node", node="n1")
            await asyncio.sleep(10)
            stored = await made.stored(uid(1))
            assert stored is not None
            assert (stored.node, stored.evacuating) == ("n1", False)

    run(body)


@pytest.mark.parametrize("fenced", [False, True])
def test_no_node_but_its_own_takes_the_vm_of_a_pod_and_that_one_unless_it_is_fenced(
    fenced: bool,
) -> None:
    there = {"node_selector": {HOSTNAME: "n2"}}
    pod = record(owner="cri-n1", node=UNPLACED, spec=spec(**there))
    full = node("n1", labels={HOSTNAME: "n2"}, disk_free_bytes=1, disk_reserve_bytes=2)
    nodes = [
        Candidate(full, 0, 99, 2**60, cordoned="is closed", fenced=fenced),
        Candidate(node("n2"), 0, 0, 0),
    ]
    for one in (pod, pod.model_copy(update={"spec": spec()})):
        placement = place(one.spec, nodes, want=demand_of_vm(one))
        assert placement.refused == {
            **({"n1": "is closed"} if fenced else {}),
            "n2": "is not n1, whose container runtime made the VM",
        }
        assert placement.nodes == (() if fenced else ("n1",))


def test_other_vms_get_what_kubelet_does_not_give_to_pods() -> None:
    fleet = Fleet()
    pod = record(1, owner="cri-n1", powered=True)
    fleet.apply(StoredVm(pod, 1))
    fleet.apply(StoredVm(record(2, "other", powered=True), 2))
    vcpus, each_bytes = demand_of_vm(pod)[:2]
    shares = [(0.0, 0), (4.0, 8 * GIB)]
    free = []
    for cpus, memory_bytes in shares:
        whole = node(kubernetes_cpus=cpus, kubernetes_memory_bytes=memory_bytes)
        fleet.put_node("$KV.node.n1", encode(whole), 0.0, 0)
        there = fleet.candidate("n1", 0.0)
        free.append((there.free_vcpus, there.free_memory_bytes + MEMORY_RESERVE_BYTES))
    assert free == [
        (8 * CPU_OVERCOMMIT - 2 * vcpus, 16 * GIB - 2 * each_bytes),
        (4 * CPU_OVERCOMMIT - vcpus, 8 * GIB - each_bytes),
    ]
