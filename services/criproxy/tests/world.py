"""A node with two runtimes that are fakes at the gRPC wire; the proxy and its socket are real."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
from cri_api.v1 import api_pb2

from virtbus.criproxy.core import calls
from virtbus.criproxy.service import CriProxy
from virtbus.criproxy.settings import Settings

Plain = dict[str, Any]
UNKNOWN_FIELD = b"\xfa\x3f\x03new"
"""Field 1023 with the text `new`: no message of these stubs has it."""
TARGET = {"kubernetes.io/target-runtime": "virtlet.cloud"}
MIB = 1024 * 1024


def request(name: str, **fields: Any) -> Any:
    """Return the request of a call."""
    kind = {"GetContainerEvents": "GetEvents"}.get(name, name)
    return getattr(api_pb2, f"{kind}Request")(**fields)


def answered(name: str) -> Any:
    """Return the type of a call's answer."""
    if name == "GetContainerEvents":
        return api_pb2.ContainerEventResponse
    return getattr(api_pb2, f"{name}Response")


class FakeRuntime(grpc.GenericRpcHandler):
    """A runtime with real ids and lists. Tests change its answers by `errors`, `hangs`, `raw`."""

    def __init__(self, name: str, socket: Path) -> None:
        self.name = name
        self.socket = socket
        self.sandboxes: dict[str, Any] = {}
        self.containers: dict[str, Any] = {}
        self.images: dict[str, Any] = {}
        self.conditions = {"RuntimeReady": True, "NetworkReady": True}
        self.handlers: tuple[str, ...] = ("", name)
        self.asked: list[tuple[str, Any]] = []
        self.deadlines: dict[str, float | None] = {}
        self.metadata: dict[str, str | bytes] = {}
        self.cancelled: list[str] = []
        self.errors: dict[str, tuple[grpc.StatusCode, str]] = {}
        self.hangs: set[str] = set()
        self.raw: dict[str, bytes] = {}
        """Bytes that are appended to a call's answer."""
        self.answers: dict[str, Callable[[Any], Any]] = {}
        self.events: asyncio.Queue[Any] = asyncio.Queue()
        self.streams = 0
        self._server: grpc.aio.Server | None = None
        self._made = 0

    # --- the process ----------------------------------------------------------------------
    async def start(self) -> None:
        """Serve; nothing was lost since `stop`."""
        self.socket.unlink(missing_ok=True)
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", 16 * MIB),
                ("grpc.max_send_message_length", 32 * MIB),
            ]
        )
        self._server.add_generic_rpc_handlers([self])
        self._server.add_insecure_port(f"unix:{self.socket}")
        await self._server.start()

    async def stop(self) -> None:
        """End as `kill -9` does: calls break off."""
        if self._server is not None:
            await self._server.stop(None)
        self._server = None

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        name = str(handler_call_details.method).rpartition("/")[2]
        self.metadata = dict(handler_call_details.invocation_metadata or ())
        if name == "GetContainerEvents":
            return grpc.unary_stream_rpc_method_handler(self._stream)

        async def single(body: bytes, context: Any) -> bytes:
            return await self._single(name, body, context)

        return grpc.unary_unary_rpc_method_handler(single)

    async def _single(self, name: str, body: bytes, context: Any) -> bytes:
        asked = request(name).FromString(body)
        self.asked.append((name, asked))
        self.deadlines[name] = context.time_remaining()
        if name in self.errors:
            context.set_trailing_metadata((("runtime-detail", self.name),))
            await context.abort(*self.errors[name])
        if name in self.hangs:
            try:
                await asyncio.get_running_loop().create_future()
            except asyncio.CancelledError:
                self.cancelled.append(name)
                raise
        answer = self.answers[name](asked) if name in self.answers else self._answer(name, asked)
        return bytes(answer.SerializeToString()) + self.raw.get(name, b"")

    async def _stream(self, _: bytes, context: Any) -> None:
        if "GetContainerEvents" in self.errors:
            await context.abort(*self.errors["GetContainerEvents"])
        self.streams += 1
        try:
            while True:
                await context.write((await self.events.get()).SerializeToString())
        finally:
            self.streams -= 1

    # --- the state ------------------------------------------------------------------------
    def count(self, name: str) -> int:
        """Return the number of calls of a name."""
        return sum(asked == name for asked, _ in self.asked)

    def _new_id(self) -> str:
        self._made += 1
        return f"{self.name}{self._made:056x}"

    def _answer(self, name: str, asked: Any) -> Any:
        make = getattr(self, f"_{name}", None)
        return make(asked) if make is not None else answered(name)()

    def _Version(self, _: Any) -> Any:  # noqa: N802  CRI's own names
        return api_pb2.VersionResponse(runtime_name=self.name, runtime_version="1")

    def _Status(self, asked: Any) -> Any:  # noqa: N802
        told = [
            api_pb2.RuntimeCondition(type=kind, status=on, reason="" if on else "Broken")
            for kind, on in self.conditions.items()
        ]
        return api_pb2.StatusResponse(
            status=api_pb2.RuntimeStatus(conditions=told),
            runtime_handlers=[api_pb2.RuntimeHandler(name=one) for one in self.handlers],
            info={self.name: "{}"} if asked.verbose else {},
        )

    def _RunPodSandbox(self, asked: Any) -> Any:  # noqa: N802
        config = asked.config
        for known in self.sandboxes.values():
            if known.metadata == config.metadata:
                return api_pb2.RunPodSandboxResponse(pod_sandbox_id=known.id)
        one = api_pb2.PodSandbox(
            id=self._new_id(),
            metadata=config.metadata,
            labels=dict(config.labels),
            annotations=dict(config.annotations),
            runtime_handler=asked.runtime_handler,
        )
        self.sandboxes[one.id] = one
        return api_pb2.RunPodSandboxResponse(pod_sandbox_id=one.id)

    def _StopPodSandbox(self, asked: Any) -> Any:  # noqa: N802
        if asked.pod_sandbox_id in self.sandboxes:
            self.sandboxes[asked.pod_sandbox_id].state = api_pb2.SANDBOX_NOTREADY
        return api_pb2.StopPodSandboxResponse()

    def _RemovePodSandbox(self, asked: Any) -> Any:  # noqa: N802
        self.sandboxes.pop(asked.pod_sandbox_id, None)
        for key, one in list(self.containers.items()):
            if one.pod_sandbox_id == asked.pod_sandbox_id:
                del self.containers[key]
        return api_pb2.RemovePodSandboxResponse()

    def _PodSandboxStatus(self, asked: Any) -> Any:  # noqa: N802
        one = self.sandboxes[asked.pod_sandbox_id]
        status = api_pb2.PodSandboxStatus(id=one.id, metadata=one.metadata, state=one.state)
        return api_pb2.PodSandboxStatusResponse(status=status)

    def _ListPodSandbox(self, asked: Any) -> Any:  # noqa: N802
        wanted = asked.filter
        found = [
            one
            for one in self.sandboxes.values()
            if one.id.startswith(wanted.id)
            and (not wanted.HasField("state") or one.state == wanted.state.state)
            and dict(wanted.label_selector).items() <= dict(one.labels).items()
        ]
        return api_pb2.ListPodSandboxResponse(items=found)

    def _CreateContainer(self, asked: Any) -> Any:  # noqa: N802
        config = asked.config
        one = api_pb2.Container(
            id=self._new_id(),
            pod_sandbox_id=asked.pod_sandbox_id,
            metadata=config.metadata,
            image=config.image,
            image_ref=config.image.image,
            labels=dict(config.labels),
        )
        self.containers[one.id] = one
        return api_pb2.CreateContainerResponse(container_id=one.id)

    def _StartContainer(self, asked: Any) -> Any:  # noqa: N802
        self.containers[asked.container_id].state = api_pb2.CONTAINER_RUNNING
        return api_pb2.StartContainerResponse()

    def _StopContainer(self, asked: Any) -> Any:  # noqa: N802
        if asked.container_id in self.containers:
            self.containers[asked.container_id].state = api_pb2.CONTAINER_EXITED
        return api_pb2.StopContainerResponse()

    def _RemoveContainer(self, asked: Any) -> Any:  # noqa: N802
        self.containers.pop(asked.container_id, None)
        return api_pb2.RemoveContainerResponse()

    def _ContainerStatus(self, asked: Any) -> Any:  # noqa: N802
        one = self.containers[asked.container_id]
        status = api_pb2.ContainerStatus(id=one.id, metadata=one.metadata, state=one.state)
        return api_pb2.ContainerStatusResponse(status=status)

    def _ListContainers(self, asked: Any) -> Any:  # noqa: N802
        wanted = asked.filter
        found = [
            one
            for one in self.containers.values()
            if one.id.startswith(wanted.id)
            and one.pod_sandbox_id.startswith(wanted.pod_sandbox_id)
            and (not wanted.HasField("state") or one.state == wanted.state.state)
        ]
        return api_pb2.ListContainersResponse(containers=found)

    def _ListContainerStats(self, _: Any) -> Any:  # noqa: N802
        told = [
            api_pb2.ContainerStats(attributes=api_pb2.ContainerAttributes(id=key))
            for key in self.containers
        ]
        return api_pb2.ListContainerStatsResponse(stats=told)

    def _Attach(self, _: Any) -> Any:  # noqa: N802
        return api_pb2.AttachResponse(url=f"http://127.0.0.1:1/{self.name}")

    def _ListImages(self, asked: Any) -> Any:  # noqa: N802
        name = asked.filter.image.image
        found = [one for one in self.images.values() if name in {"", one.id, *one.repo_tags}]
        return api_pb2.ListImagesResponse(images=found)

    def _ImageStatus(self, asked: Any) -> Any:  # noqa: N802
        for one in self.images.values():
            if asked.image.image in {one.id, *one.repo_tags}:
                return api_pb2.ImageStatusResponse(image=one)
        return api_pb2.ImageStatusResponse()

    def _PullImage(self, asked: Any) -> Any:  # noqa: N802
        key = f"sha256:{self.name}-{asked.image.image}"
        self.images[key] = api_pb2.Image(id=key, repo_tags=[asked.image.image])
        return api_pb2.PullImageResponse(image_ref=key)

    def _RemoveImage(self, asked: Any) -> Any:  # noqa: N802
        self.images.pop(asked.image.image, None)
        return api_pb2.RemoveImageResponse()

    def _ImageFsInfo(self, _: Any) -> Any:  # noqa: N802
        at = api_pb2.FilesystemIdentifier(mountpoint=f"/{self.name}")
        one = api_pb2.FilesystemUsage(fs_id=at)
        return api_pb2.ImageFsInfoResponse(image_filesystems=[one])


class Node:
    """Both runtimes and the proxy. `call` is kubelet's side."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder = folder
        self.containers = FakeRuntime("containerd", folder / "containerd.sock")
        self.vms = FakeRuntime("virtbus", folder / "cri.sock")
        self.settings = Settings(
            node="n1",
            state_dir=folder / "state",
            run_dir=folder,
            container_runtime=self.containers.socket,
            **{"answer_limit_s": 1.0, "away_grace_s": 0.0, **settings},
        )
        self._stack = AsyncExitStack()
        self._proxy: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Node"]:
        """Run both runtimes and the proxy."""
        try:
            await self.containers.start()
            await self.vms.start()
            await self.start()
            yield self
        finally:
            await self.end()
            await self.containers.stop()
            await self.vms.stop()

    async def start(self) -> None:
        """Start the proxy, and connect to it."""
        self.proxy = CriProxy(self.settings)
        self._proxy = asyncio.Task(self.proxy.run())
        while not self.settings.socket.is_socket() and not self._proxy.done():
            await asyncio.sleep(0.005)  # a channel that finds no socket waits a second
        channel = grpc.aio.insecure_channel(
            f"unix:{self.settings.socket}",
            options=[("grpc.max_send_message_length", 64 * MIB)],
        )
        self.channel = await self._stack.enter_async_context(channel)

    async def end(self) -> None:
        """End the proxy."""
        await self._stack.aclose()
        if self._proxy is not None:
            self._proxy.cancel()
            with suppress(asyncio.CancelledError):
                await self._proxy
        self._proxy = None

    async def restart(self) -> None:
        """Start the proxy again, on the same state."""
        await self.end()
        await self.start()

    # --- kubelet --------------------------------------------------------------------------
    async def call(self, name: str, timeout_s: float = 20, **fields: Any) -> Any:
        """Call the proxy, and return the message."""
        body = await self.raw(name, request(name, **fields).SerializeToString(), timeout_s)
        return answered(name).FromString(body)

    async def raw(self, name: str, body: bytes, timeout_s: float = 20) -> bytes:
        """Call the proxy with bytes."""
        method: Any = self.channel.unary_unary(calls.PATHS[name])
        told: bytes = await method(body, timeout=timeout_s)
        return told

    async def parts(self, name: str) -> list[bytes]:
        """Return the messages of a list in parts."""
        method: Any = self.channel.unary_stream(calls.PATHS[name])
        return [one async for one in method(b"", timeout=20)]

    async def refused(self, name: str, **fields: Any) -> tuple[grpc.StatusCode, str]:
        """Return the status and text of a call that fails."""
        try:
            await self.call(name, **fields)
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details() or ""
        raise AssertionError(f"{name} succeeded")

    def events(self) -> Any:
        """Open GetContainerEvents."""
        method: Any = self.channel.unary_stream(calls.PATHS["GetContainerEvents"])
        return method(b"")

    async def pod(self, name: str, *, vm: bool, container: bool = True) -> tuple[str, str]:
        """Run a pod as kubelet does; return the ids of its sandbox and container."""
        ran = await self.call(
            "RunPodSandbox",
            config=sandbox(name),
            runtime_handler="virtbus" if vm else "",
        )
        if not container:
            return ran.pod_sandbox_id, ""
        made = await self.call(
            "CreateContainer",
            pod_sandbox_id=ran.pod_sandbox_id,
            config={"metadata": {"name": "c"}, "image": {"image": "sha256:1"}},
        )
        await self.call("StartContainer", container_id=made.container_id)
        return ran.pod_sandbox_id, made.container_id

    async def listed(self, **wanted: Any) -> set[str]:
        """Return the ids that ListContainers has."""
        answer = await self.call("ListContainers", filter=wanted or None)
        return {one.id for one in answer.containers}

    async def sandboxes(self, **wanted: Any) -> set[str]:
        """Return the ids that ListPodSandbox has."""
        answer = await self.call("ListPodSandbox", filter=wanted or None)
        return {one.id for one in answer.items}

    async def condition(self, kind: str) -> Any:
        """Return one condition of Status."""
        status = (await self.call("Status")).status
        (found,) = [one for one in status.conditions if one.type == kind]
        return found

    async def back(self, kind: str) -> None:
        """Wait until a condition is true."""
        for _ in range(100):
            if (await self.condition(kind)).status:
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"never true: {kind}")

    async def settled(self) -> None:
        """List all, and wait until the proxy has kept the lists."""
        await self.listed()
        await self.sandboxes()
        await self.call("ListImages")
        await self.call("ListContainerStats")
        await self.call("Status")
        await self.call("Version")
        await self.call("ImageFsInfo")
        await self.proxy.memory.kept()


def sandbox(name: str, **changes: Any) -> Plain:
    """Return a `PodSandboxConfig` as kubelet sends it."""
    identity = {"name": name, "uid": f"uid-{name}", "namespace": "default", "attempt": 0}
    whole: Plain = {"metadata": identity, "labels": {"app": name}}
    return whole | changes


async def until(true: Callable[[], bool], what: str) -> None:
    """Wait until something is true."""
    for _ in range(1000):
        if true():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"never: {what}")
