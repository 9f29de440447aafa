"""The whole bridge, between an API server and a controller in memory."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from services.kubebridge.tests.api_server import ApiServer, Name, api_server
from services.kubebridge.tests.manifests import put, vm
from services.kubebridge.tests.world import view

from virtbus.bus.client.memory_bus import MemoryBus, MemoryServer
from virtbus.bus.client.ports import Endpoint, Request, ServiceInfo
from virtbus.bus.runtime.tasks import background
from virtbus.kubebridge.core.node.labels import SCHEDULABLE
from virtbus.kubebridge.core.runtime.controller import BUS_VM, KUBEVIRT, VM, VMI
from virtbus.kubebridge.edge import cluster
from virtbus.kubebridge.service import Bridge
from virtbus.kubebridge.settings import Settings
from virtbus.schemas.api import NodePage, VmCreate, VmCreated, VmDelete
from virtbus.schemas.network import InterfaceStatus
from virtbus.schemas.node import NodeState, NodeView
from virtbus.schemas.states import VmState
from virtbus.schemas.subjects import api
from virtbus.schemas.vm_status import VmView
from virtbus.schemas.wire import validate

NAME = "kubevirt-smoke-fedora"
VM_AT, VMI_AT = Name("virtualmachines", "default", NAME), Name(VMI.plural, "default", NAME)
NIC = InterfaceStatus(name="default", mac="02:00:00:00:00:05", addresses=("10.0.0.5/24",))


class Controller:
    """A controller whose VMs run at once and are gone as soon as they are deleted."""

    def __init__(self) -> None:
        self.vms: dict[str, VmView] = {}
        self._changes: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    async def create(self, request: Request) -> VmCreated:
        want = validate(VmCreate, request.data)
        uid = str(want.uid)
        made = view(uid, name=want.name, labels=want.labels, state=VmState.RUNNING)
        self.vms[uid] = made.model_copy(update={"interfaces": (NIC,), "revision": 2})
        self._changes.put_nowait({"change": encode_view(self.vms[uid])})
        return VmCreated(vm=made, created=True)

    async def delete(self, request: Request) -> VmView:
        uid = str(validate(VmDelete, request.data).uid)
        gone = self.vms.pop(uid).model_copy(update={"deleting": True, "revision": 3})
        self._changes.put_nowait({"change": encode_view(gone)})
        self._changes.put_nowait({"gone": uid})
        return gone

    async def watch(self, request: Request) -> None:
        await request.stream({"synced": True})
        while True:
            await request.stream(await self._changes.get())

    async def nodes(self, _: Request) -> NodePage:
        node = NodeView(node="n1", hostname="n1", instance="i", state=NodeState.READY, cpus=4,
                        memory_bytes=1)  # fmt: skip
        return NodePage(items=(node,))

    def endpoints(self) -> list[Endpoint]:
        verbs = {"create": self.create, "delete": self.delete, "watch": self.watch}
        of_vms = [Endpoint(verb, api("vm", verb), handler) for verb, handler in verbs.items()]
        return [*of_vms, Endpoint("nodes", api("node", "list"), self.nodes)]


def encode_view(one: VmView) -> dict[str, Any]:
    return one.model_dump(mode="json")


@asynccontextmanager
async def bridged(tmp_path: Path) -> AsyncIterator[tuple[ApiServer, Controller, Bridge]]:
    server, controller = MemoryServer(), Controller()
    bus, theirs = MemoryBus(server, "bridge"), MemoryBus(server, "controller")
    async with (
        asyncio.timeout(60),
        api_server(tmp_path) as (objects, kubeconfig),
        theirs.serve(ServiceInfo("controller", "1.0.0"), controller.endpoints()),
        cluster.connect(kubeconfig) as client,
        background() as tasks,
    ):
        settings = Settings(node="b", cluster="c1", listen="127.0.0.1:0")
        bridge = Bridge(bus, client, settings, "c1")
        tasks.start(bridge.run())
        await bridge.reconciler.until_synced(VM, VMI, BUS_VM)
        yield objects, controller, bridge


async def until(check: Callable[[], Any]) -> None:
    while not check():
        await asyncio.sleep(0.02)


def printable(objects: ApiServer) -> str:
    return str(objects.objects[VM_AT].get("status", {}).get("printableStatus", ""))


async def test_a_vm_runs_until_it_is_deleted(tmp_path: Path) -> None:
    async with bridged(tmp_path) as (objects, controller, _):
        objects.create(VM_AT, vm())
        await until(lambda: printable(objects) == "Running")
        (uid,) = controller.vms
        assert objects.objects[VMI_AT]["metadata"]["uid"] == uid
        objects.delete(VM_AT)
        await until(lambda: VM_AT not in objects.objects)
        assert VMI_AT not in objects.objects
        assert controller.vms == {}


async def test_a_vmi_that_waits_for_a_secret_starts_when_it_is_made(tmp_path: Path) -> None:
    seeded = put(
        vm(), {"spec.template.spec.volumes.2.cloudInitNoCloud": {"secretRef": {"name": "s"}}}
    )
    secret = Name("secrets", "default", "s")
    async with bridged(tmp_path) as (objects, controller, _):
        objects.create(VM_AT, seeded)
        await until(lambda: secret in objects.reads)
        await until(lambda: "Synchronized" in str(objects.objects[VMI_AT].get("status")))
        await asyncio.sleep(1.0)
        assert objects.reads.count(secret) <= 3, "it is watched, not polled"
        assert controller.vms == {}
        objects.create(secret, {"metadata": {"name": "s"}, "data": {"userdata": "IyEvYmluL3No"}})
        await until(lambda: printable(objects) == "Running")


async def test_services_nodes_and_the_kubevirt_object_follow(tmp_path: Path) -> None:
    async with bridged(tmp_path) as (objects, _, bridge):
        node, kubevirt = Name("nodes", "", "n1"), Name(KUBEVIRT.plural, "kubevirt", "kubevirt")
        objects.create(node, {"metadata": {"name": "n1"}})
        objects.create(kubevirt, {"metadata": {"name": "kubevirt"}})
        spec = {"selector": {"vm.kubevirt.io/name": NAME}, "ports": [{"port": 80}]}
        objects.create(Name("services", "default"), {"metadata": {"name": "web"}, "spec": spec})
        objects.create(VM_AT, vm())

        def endpoints() -> list[Any]:
            found = [
                obj for name, obj in objects.objects.items() if name.plural == "endpointslices"
            ]
            return [one["addresses"] for obj in found for one in obj["endpoints"]]

        await until(lambda: endpoints() == [["10.0.0.5"]])
        await until(lambda: objects.objects[kubevirt].get("status", {}).get("phase") == "Deployed")
        await until(lambda: SCHEDULABLE in objects.objects[node]["metadata"].get("labels", {}))
        assert bridge.leads.is_set()


async def test_a_bridge_that_gets_the_lease_late_reconciles_what_it_dropped(tmp_path: Path) -> None:
    async with bridged(tmp_path) as (objects, _, bridge):
        await bridge.leads.wait()
        bridge.leads.clear()
        objects.create(VM_AT, vm())
        await until(lambda: bridge.reconciler.queue.dropped)
        assert VMI_AT not in objects.objects
        bridge.leads.set()
        await until(lambda: printable(objects) == "Running")
