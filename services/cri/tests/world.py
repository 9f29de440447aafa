"""A node whose fleet is a fake: controllers and imaged as values, the CRI and its socket real."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
from cri_api.v1 import api_pb2
from services.cri.tests.agent import Agent
from services.cri.tests.guest import Guest

from virtbus.bus.client.memory_bus import MemoryBus, MemoryServer
from virtbus.bus.client.ports import Bus, Endpoint, Request, ServiceInfo
from virtbus.bus.errors import UnavailableError
from virtbus.cri.edge.guest_shell import GuestShell
from virtbus.cri.service import Cri
from virtbus.cri.settings import Settings
from virtbus.schemas import subjects
from virtbus.schemas.api import NodeDetail, VmCreate, VmCreated, VmRef, VmUpdate, WatchReply
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.guest_end import GuestExit
from virtbus.schemas.image import ImageFormat, ImageInfo
from virtbus.schemas.image_api import ImagePull, PulledImages
from virtbus.schemas.network import InterfaceStatus, NetworkState
from virtbus.schemas.node import NodeState, NodeView
from virtbus.schemas.resources import NO_LIMITS, ResourcesInForce
from virtbus.schemas.states import VmState
from virtbus.schemas.vm import VmSpec
from virtbus.schemas.vm_status import NETWORK_READY, Condition, VmView
from virtbus.schemas.wire import validate

NODE = "n1"
ADDRESS = "10.127.0.7"
DIGEST = "sha256:" + "a" * 64
OTHER_DIGEST = "sha256:" + "b" * 64
AT_NS = 1_800_000_000_000_000_000

Plain = dict[str, Any]


class Fleet:
    """The controllers and imaged of one node. A test changes its VMs by `show`."""

    def __init__(self) -> None:
        self.server = MemoryServer()
        self.bus = MemoryBus(self.server)
        self.agent = Agent(self.bus, NODE)
        self.guest = Guest()
        self.address = ADDRESS
        self.vms: dict[str, VmView] = {}
        self.images = {"tiny": DIGEST, "other": OTHER_DIGEST}
        self.requests: list[tuple[str, Any]] = []
        self.errors: dict[str, VirtbusError] = {}
        self.protected: set[str] = set()
        """The uids of VMs that are not deleted."""
        self.boots = True
        """A started guest runs at once, and a stopped one powers itself off."""
        self.node = NodeView(
            node=NODE,
            hostname=NODE,
            instance="i1",
            state=NodeState.READY,
            cpus=2,
            memory_bytes=2**32,
            labels={"kubernetes.io/hostname": "worker-1"},
        )
        self.at_start: Plain = {}
        """The changes of a VM that a start request causes instead of a boot."""
        self.networks = True
        """The network of a VM that is off has the state of its record at once."""
        self.network_error = ""
        """The text with which each network fails."""
        self.enforces = True
        """The limits of a record are enforced at once."""
        self.held: dict[str, asyncio.Event] = {}
        """By request: it is done and answered once the event is set."""
        self.started_ns = 0
        """The time at which each guest is started; 0: long ago."""
        self.away = False
        self.links: list[MemoryBus] = []
        self._watchers: set[asyncio.Queue[WatchReply | None]] = set()
        self._ticks = AT_NS

    def tick(self) -> int:
        """Return a later time than before."""
        self._ticks += 1_000_000_000
        return self._ticks

    @property
    def vm(self) -> VmView:
        """The only VM."""
        (view,) = self.vms.values()
        return view

    def show(self, uid: str, **fields: Any) -> VmView:
        """Change a VM, and tell the watchers."""
        return self.put(self.vms[uid].model_copy(update=fields))

    def put(self, view: VmView) -> VmView:
        """Show a VM to the watchers."""
        self.vms[view.uid] = view
        self._tell(WatchReply(change=view))
        return view

    def end(self, how: str) -> VmView:
        """End the guest of the only VM by itself."""
        state = VmState.SUCCEEDED if how == "shut down" else VmState.FAILED
        last = GuestExit.model_validate({"how": how, "asked": False, "at_ns": self.tick()})
        return self.show(self.vm.uid, state=state, last_exit=last)

    def remove(self, uid: str) -> None:
        """Delete a VM."""
        self.show(uid, deleting=True, state=VmState.DELETING)
        del self.vms[uid]
        self._tell(WatchReply(gone=uid))

    async def end_watch(self) -> None:
        """End the watch of the CRI, and wait until it is begun again."""
        while not self._watchers:
            await asyncio.sleep(0.01)
        for watcher in tuple(self._watchers):
            self._watchers.discard(watcher)
            for reply in (WatchReply(resync=True), None):
                watcher.put_nowait(reply)
        while not self._watchers:
            await asyncio.sleep(0.01)

    def asked(self, name: str) -> list[Any]:
        """Return the requests of one kind."""
        return [data for kind, data in self.requests if kind == name]

    @property
    def created(self) -> list[Any]:
        """Return the requests that give a VM its disks."""
        return [data for data in self.asked("vm.create") if data["spec"].get("volumes")]

    def _tell(self, reply: WatchReply) -> None:
        for watcher in self._watchers:
            watcher.put_nowait(reply)

    # --- the bus of the CRI ---------------------------------------------------------------
    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Bus]:
        """Open the CRI's connection."""
        if self.away:
            raise UnavailableError("the test has no bus")
        link = MemoryBus(self.server)
        self.links.append(link)
        try:
            yield link
        finally:
            self.links.remove(link)
            await link.aclose()

    def cut(self) -> None:
        """Take the bus away."""
        self.away = True
        for link in self.links:
            link.disconnect()

    def mend(self) -> None:
        """Bring the bus back."""
        self.away = False
        for link in self.links:
            link.reconnect()

    # --- the API --------------------------------------------------------------------------
    @asynccontextmanager
    async def serving(self) -> AsyncIterator["Fleet"]:
        """Answer the API's requests."""
        handlers: dict[str, Callable[[Any], Any]] = {
            "vm.create": self._create,
            "vm.get": self._get,
            "vm.update": self._update,
            "vm.start": self._start,
            "vm.stop": self._stop,
            "vm.delete": self._delete,
            "image.pull": self._pull,
            "node.get": self._node,
        }
        endpoints = [self._endpoint(name, handler) for name, handler in handlers.items()]
        watch = Endpoint("vm-watch", subjects.api("vm", "watch"), self._watch)
        endpoints += [watch, *self.agent.endpoints()]
        async with self.bus.serve(ServiceInfo("controller", "1.0.0"), endpoints):
            try:
                yield self
            finally:
                for watcher in self._watchers:
                    watcher.put_nowait(None)
        await self.bus.aclose()

    def _endpoint(self, name: str, handler: Callable[[Any], Any]) -> Endpoint:
        async def answer(request: Request) -> Any:
            self.requests.append((name, request.data))
            if name in self.errors:
                raise self.errors[name]
            if name in self.held:
                await self.held[name].wait()
            return handler(request.data)

        return Endpoint(name.replace(".", "-"), subjects.api(*name.split(".")), answer)

    async def _watch(self, request: Request) -> None:
        queue: asyncio.Queue[WatchReply | None] = asyncio.Queue()
        self._watchers.add(queue)
        try:
            await request.stream(WatchReply(items=tuple(self.vms.values())))
            await request.stream(WatchReply(synced=True))
            while (reply := await queue.get()) is not None:
                await request.stream(reply)
        finally:
            self._watchers.discard(queue)

    def _create(self, data: Any) -> VmCreated:
        want = validate(VmCreate, data)
        assert want.uid is not None
        known = self.vms.get(want.uid)
        if known is None:
            self.vms[want.uid] = VmView(
                uid=want.uid,
                namespace=want.namespace,
                name=want.name,
                labels=want.labels,
                annotations=want.annotations,
                node=NODE,
                epoch=1,
                generation=1,
                revision=1,
                created_ns=self.tick(),
                state=VmState.STOPPED,
                powered=False,
                spec=want.spec or VmSpec(),
            )
            self._tell(WatchReply(change=self.vms[want.uid]))
        elif not known.spec.volumes and want.spec is not None and want.spec.volumes:
            self._asked(known, spec=want.spec, labels=want.labels)
        asked = self.vms[want.uid]
        self.network(want.uid)
        return VmCreated(vm=asked, created=known is None)

    def _asked(self, view: VmView, **fields: Any) -> VmView:
        """Change the record of a VM, with its spec."""
        newer = {"revision": view.revision + 1, "generation": view.generation + 1}
        return self.show(view.uid, **newer, **fields)

    def network(self, uid: str) -> None:
        """Bring the network of a VM that is off to the state of its record, and report that."""
        view = self.vms[uid]
        state = view.spec.network_state
        if state is None or view.powered or not self.networks:
            return
        held = state is NetworkState.HELD and not self.network_error
        why = {"reason": "cni_failed", "message": self.network_error}
        about = why if self.network_error else {"reason": str(state)}
        self.show(
            uid,
            observed_generation=view.generation,
            interfaces=(self._nic(),) if held else (),
            conditions=(Condition(type=NETWORK_READY, status=held, **about),),
        )

    def _nic(self) -> InterfaceStatus:
        addresses = (f"{self.address}/16",) if self.address else ()
        return InterfaceStatus(name="default", mac="02:00:00:00:00:01", addresses=addresses)

    def _find(self, uid: str | None) -> VmView:
        if uid not in self.vms:
            raise VirtbusError(Code.NOT_FOUND, "vm_not_found", "there is no such VM")
        return self.vms[uid]

    def _get(self, data: Any) -> VmView:
        return self._find(validate(VmRef, data).uid)

    def _update(self, data: Any) -> VmView:
        want = validate(VmUpdate, data)
        view = self._find(want.uid)
        asked = self.show(
            view.uid,
            revision=view.revision + 1,
            generation=view.generation + (want.spec is not None),
            labels=want.labels or view.labels,
            spec=want.spec or view.spec,
        )
        self.network(view.uid)
        if self.boots and self.enforces:
            self.enforce(view.uid)
        return asked

    def enforce(self, uid: str) -> None:
        """Set the limits of the record on the host, if the guest runs."""
        view = self.vms[uid]
        wanted = view.spec.domain.resources or NO_LIMITS
        up = view.state is VmState.RUNNING
        told = ResourcesInForce(**wanted.model_dump()) if up else None
        self.show(uid, observed_generation=view.generation, resources=told, conditions=())

    def _start(self, data: Any) -> VmView:
        view = self._find(data["uid"])
        asked = self.show(view.uid, revision=view.revision + 1, powered=True, power_observed=False)
        if self.at_start:
            self.show(view.uid, **self.at_start)
        elif self.boots:
            self.show(
                view.uid,
                state=VmState.RUNNING,
                power_observed=True,
                started_ns=self.started_ns or self.tick(),
                interfaces=(self._nic(),),
            )
            if self.enforces:
                self.enforce(view.uid)
        return asked

    def _stop(self, data: Any) -> VmView:
        view = self._find(data["uid"])
        was_up = view.state is VmState.RUNNING
        asked = self.show(view.uid, revision=view.revision + 1, powered=False, power_observed=False)
        if self.boots:
            last = GuestExit(how="shut down", asked=True, at_ns=self.tick())
            self.show(
                view.uid,
                power_observed=True,
                state=VmState.STOPPED,
                last_exit=last if was_up else view.last_exit,
            )
            self.network(view.uid)
        return asked

    def _delete(self, data: Any) -> VmView:
        view = self._find(data["uid"])
        if view.uid in self.protected:
            raise VirtbusError(Code.CONFLICT, "protected", "the VM is protected")
        self.remove(view.uid)
        return view

    def _pull(self, data: Any) -> PulledImages:
        want = validate(ImagePull, data)
        name, _, digest = want.ref.partition("@")
        if name not in self.images:
            raise VirtbusError(Code.NOT_FOUND, "image_unknown", f"no image {name}")
        if digest and digest != self.images[name]:
            raise VirtbusError(Code.CONFLICT, "digest_mismatch", f"{name} has another digest")
        info = ImageInfo(
            digest=self.images[name],
            format=ImageFormat.QCOW2,
            size_bytes=1000,
            virtual_size_bytes=5000,
        )
        return PulledImages(images={NODE: info})

    def _node(self, _: Any) -> NodeDetail:
        return NodeDetail(node=self.node)


class Kubelet:
    """A client of the socket. Its methods have the names of CRI's calls."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel

    async def call(self, name: str, timeout_s: float = 20, **request: Any) -> Any:
        """Call RuntimeService, or ImageService for calls about images."""
        kind = "ImageService" if "Image" in name else "RuntimeService"
        method = api_pb2.DESCRIPTOR.services_by_name[kind].methods_by_name[name]
        asked = getattr(api_pb2, method.input_type.name)
        answered = getattr(api_pb2, method.output_type.name)
        send = self._channel.unary_unary(
            f"/runtime.v1.{kind}/{name}", asked.SerializeToString, answered.FromString
        )
        return await send(asked(**request), timeout=timeout_s)

    async def events(self) -> AsyncIterator[Any]:
        """GetContainerEvents."""
        asked, answered = api_pb2.GetEventsRequest, api_pb2.ContainerEventResponse
        send = self._channel.unary_stream(
            "/runtime.v1.RuntimeService/GetContainerEvents",
            asked.SerializeToString,
            answered.FromString,
        )
        async for event in send(asked()):
            yield event

    async def refused(self, name: str, **request: Any) -> tuple[grpc.StatusCode, str]:
        """Return the status and text of a call's refusal."""
        try:
            answer = await self.call(name, **request)
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details() or ""
        raise AssertionError(answer)

    async def sandbox(self, **changes: Any) -> str:
        """RunPodSandbox."""
        attempt = changes.pop("attempt", 0)
        answer = await self.call("RunPodSandbox", config=sandbox(attempt, **changes))
        return str(answer.pod_sandbox_id)

    async def container(self, sandbox_id: str, attempt: int = 0, **changes: Any) -> str:
        """CreateContainer of the image `tiny`, which is pulled first."""
        image = changes.pop("pull", "tiny:latest")
        pulled = await self.call("PullImage", image={"image": image})
        config = container(attempt, image={"image": pulled.image_ref}) | changes
        answer = await self.call(
            "CreateContainer",
            pod_sandbox_id=sandbox_id,
            config=config,
            sandbox_config=sandbox(),
        )
        return str(answer.container_id)

    async def running(self) -> tuple[str, str]:
        """Return the ids of a sandbox and its running container."""
        sandbox_id = await self.sandbox()
        container_id = await self.container(sandbox_id)
        await self.call("StartContainer", container_id=container_id)
        return sandbox_id, container_id

    async def status(self, container_id: str) -> Any:
        """ContainerStatus."""
        answer = await self.call("ContainerStatus", container_id=container_id)
        return answer.status

    async def until_state(self, container_id: str, state: int) -> Any:
        """Return the container's status once it has the state."""
        while (status := await self.status(container_id)).state != state:
            await asyncio.sleep(0.01)
        return status


def sandbox(attempt: int = 0, **changes: Any) -> Plain:
    """Return a `PodSandboxConfig` as kubelet sends it."""
    identity = {"name": "web", "uid": "0c5f", "namespace": "default", "attempt": attempt}
    named = {"io.kubernetes.pod.name": "web", "io.kubernetes.pod.uid": "0c5f"}
    whole: Plain = {"metadata": identity, "hostname": "web", "labels": named}
    return whole | changes


def container(attempt: int = 0, **changes: Any) -> Plain:
    """Return a `ContainerConfig` as kubelet sends it."""
    whole: Plain = {
        "metadata": {"name": "vm", "attempt": attempt},
        "labels": {"io.kubernetes.container.name": "vm"},
        "log_path": f"vm/{attempt}.log",
        "mounts": [
            {"container_path": "/etc/hosts", "host_path": "/var/lib/kubelet/hosts"},
            {"container_path": "/dev/termination-log", "host_path": "/var/lib/kubelet/t"},
        ],
    }
    return whole | changes


@asynccontextmanager
async def cri(folder: Path, fleet: Fleet, **more: Any) -> AsyncIterator[Kubelet]:
    """Run the CRI with its state in `folder` and `more` settings; its end is a clean stop."""
    settings = Settings(node=NODE, state_dir=folder / "state", run_dir=folder / "run", **more)
    service = asyncio.Task(Cri(settings, fleet.connect, shell=GuestShell(fleet.guest.port)).run())
    try:
        while not settings.socket.is_socket() and not service.done():
            await asyncio.sleep(0.005)  # a channel that finds no socket waits a second
        async with grpc.aio.insecure_channel(f"unix:{settings.socket}") as channel:
            kubelet = Kubelet(channel)
            await _answers(kubelet, fleet, service)
            yield kubelet
    finally:
        service.cancel()
        with suppress(asyncio.CancelledError):
            await service


async def _answers(kubelet: Kubelet, fleet: Fleet, service: "asyncio.Task[None]") -> None:
    """Wait until the node is known, unless the test has no bus."""
    while not service.done():
        with suppress(grpc.aio.AioRpcError):
            status = (await kubelet.call("Status", timeout_s=1)).status
            known = status.conditions[0].reason != "NodeUnknown"
            if known or fleet.away:
                return
        await asyncio.sleep(0.02)
    await service
