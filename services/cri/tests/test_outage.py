"""A bus that is away is no node that is away."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from cri_api.v1 import api_pb2
from grpc import StatusCode
from services.cri.tests.world import DIGEST, Fleet, Kubelet, cri, sandbox

from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.guest_end import GuestExit
from virtbus.schemas.local_end import LocalEnd, LocalEnded
from virtbus.schemas.wire import encode, read


@asynccontextmanager
async def agent_socket(
    folder: Path, answer: Callable[[LocalEnd], Awaitable[LocalEnded]]
) -> AsyncIterator[None]:
    """The agent's socket of the node."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        size = int.from_bytes(await reader.readexactly(4), "big")
        body = encode(await answer(read(LocalEnd, await reader.readexactly(size))))
        writer.write(len(body).to_bytes(4, "big") + body)
        writer.close()

    server = await asyncio.start_unix_server(serve, str(folder / "agent.sock"))
    try:
        yield
    finally:
        server.close()


async def all_lists(kubelet: Kubelet) -> list[bytes]:
    """Return the lists as kubelet gets them."""
    names = ("ListPodSandbox", "ListContainers", "ListImages")
    answers = [await kubelet.call(name) for name in names]
    return [answer.SerializeToString(deterministic=True) for answer in answers]


async def cut(fleet: Fleet, kubelet: Kubelet) -> None:
    """Take the bus away, and wait until the CRI has noticed."""
    fleet.cut()
    while (await kubelet.call("Status")).status.conditions[2].status:
        await asyncio.sleep(0.01)


async def test_a_restart_without_the_bus_returns_the_same_lists(
    tmp_path: Path, fleet: Fleet
) -> None:
    async with cri(tmp_path, fleet) as kubelet:
        sandbox_id, container_id = await kubelet.running()
        before = await all_lists(kubelet)
    fleet.away = True
    async with cri(tmp_path, fleet) as kubelet:
        assert await all_lists(kubelet) == before
        assert (await kubelet.status(container_id)).state == api_pb2.CONTAINER_RUNNING
        status = await kubelet.call("PodSandboxStatus", pod_sandbox_id=sandbox_id)
        assert status.status.network.ip
        conditions = (await kubelet.call("Status")).status.conditions
        assert [one.status for one in conditions] == [True, True, False]
        assert "last known state" in conditions[2].message


async def test_changes_wait_for_the_bus_with_a_reason(fleet: Fleet, kubelet: Kubelet) -> None:
    sandbox_id, container_id = await kubelet.running()
    await cut(fleet, kubelet)
    for name, request in (
        ("StopContainer", {"container_id": container_id}),  # the agent is away, too
        ("StopPodSandbox", {"pod_sandbox_id": sandbox_id}),
        ("PullImage", {"image": {"image": "other"}}),
    ):
        code, text = await kubelet.refused(name, **request)
        assert (code, "bus" in text) == (StatusCode.UNAVAILABLE, True), (name, text)
    assert (await kubelet.status(container_id)).state == api_pb2.CONTAINER_RUNNING
    fleet.mend()
    while not (await kubelet.call("Status")).status.conditions[2].status:
        await asyncio.sleep(0.01)
    await kubelet.call("StopContainer", container_id=container_id)
    assert (await kubelet.status(container_id)).state == api_pb2.CONTAINER_EXITED


async def test_a_running_pod_is_stopped_and_removed_without_the_bus(
    tmp_path: Path, fleet: Fleet
) -> None:
    asked: list[LocalEnd] = []

    async def end(want: LocalEnd) -> LocalEnded:
        asked.append(want)
        return LocalEnded(last_exit=GuestExit(how="shut down", asked=True, at_ns=fleet.tick()))

    async with cri(tmp_path, fleet) as kubelet, agent_socket(tmp_path / "run", end):
        sandbox_id, container_id = await kubelet.running()
        uid = fleet.vm.uid
        await cut(fleet, kubelet)
        await kubelet.call("StopContainer", container_id=container_id, timeout=7)
        assert asked == [LocalEnd(uid=uid, owner="cri-n1", grace_s=7)]
        status = await kubelet.status(container_id)
        ended = (status.state, status.exit_code, status.reason)
        assert ended == (api_pb2.CONTAINER_EXITED, 0, "Completed")
        await kubelet.call("StopContainer", container_id=container_id)
        await kubelet.call("StopPodSandbox", pod_sandbox_id=sandbox_id)
        assert len(asked) == 1
        fleet.mend()  # its record is powered off, and then the pod is removed
        while fleet.vm.powered:
            await asyncio.sleep(0.01)
        fleet.cut()
        await kubelet.call("RemovePodSandbox", pod_sandbox_id=sandbox_id)
        assert not (await kubelet.call("ListPodSandbox")).items
        fleet.mend()
        while fleet.vms:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    "error",
    [
        VirtbusError(Code.DEADLINE, "no_answer", "the controllers hang"),
        VirtbusError(Code.UNAVAILABLE, "bus_unavailable", "the stream has no leader"),
    ],
    ids=["silent", "without a leader"],
)
async def test_a_pod_is_stopped_while_the_controllers_can_do_nothing(
    tmp_path: Path, fleet: Fleet, error: VirtbusError
) -> None:
    async def end(_want: LocalEnd) -> LocalEnded:
        return LocalEnded(last_exit=GuestExit(how="shut down", asked=True, at_ns=fleet.tick()))

    async with cri(tmp_path, fleet) as kubelet, agent_socket(tmp_path / "run", end):
        _, container_id = await kubelet.running()
        fleet.errors["vm.stop"] = error
        await kubelet.call("StopContainer", container_id=container_id, timeout=7)
        assert (await kubelet.status(container_id)).state == api_pb2.CONTAINER_EXITED
        assert fleet.vm.powered
        fleet.errors.clear()
        while fleet.vm.powered:
            await asyncio.sleep(0.01)


async def test_an_agent_that_refuses_an_end_ends_no_container(tmp_path: Path, fleet: Fleet) -> None:
    async def refuse(_want: LocalEnd) -> LocalEnded:
        error = VirtbusError(Code.NOT_FOUND, "vm_not_here", "its agent has not read its records")
        return LocalEnded(error=error.body)

    async with cri(tmp_path, fleet) as kubelet, agent_socket(tmp_path / "run", refuse):
        _, container_id = await kubelet.running()
        await cut(fleet, kubelet)
        code, _ = await kubelet.refused("StopContainer", container_id=container_id)
        assert code == StatusCode.UNAVAILABLE  # NOT_FOUND means to kubelet that it has ended
        assert (await kubelet.status(container_id)).state == api_pb2.CONTAINER_RUNNING
        fleet.mend()


async def test_an_ended_pod_is_removed_without_the_bus(tmp_path: Path, fleet: Fleet) -> None:
    async with cri(tmp_path, fleet) as kubelet:
        sandbox_id, container_id = await kubelet.running()
        await kubelet.call("StopContainer", container_id=container_id)
        await cut(fleet, kubelet)
        await kubelet.call("StopPodSandbox", pod_sandbox_id=sandbox_id)
        await kubelet.call("RemovePodSandbox", pod_sandbox_id=sandbox_id)
        assert not (await kubelet.call("ListPodSandbox")).items
    assert fleet.vms
    fleet.mend()
    async with cri(tmp_path, fleet):
        while fleet.vms:
            await asyncio.sleep(0.01)


async def test_a_guest_that_ended_meanwhile_is_known_afterwards(
    tmp_path: Path, fleet: Fleet
) -> None:
    async with cri(tmp_path, fleet) as kubelet:
        _, container_id = await kubelet.running()
    fleet.end("panicked")
    async with cri(tmp_path, fleet) as kubelet:
        status = await kubelet.until_state(container_id, api_pb2.CONTAINER_EXITED)
        assert status.reason == "GuestPanicked"


async def test_a_list_without_the_vm_ends_nothing(tmp_path: Path, fleet: Fleet) -> None:
    async with cri(tmp_path, fleet) as kubelet:
        _, container_id = await kubelet.running()
    view = fleet.vms.pop(fleet.vm.uid)  # a controller that has not read all yet
    async with cri(tmp_path, fleet) as kubelet:
        await kubelet.call("ListContainers")
        assert (await kubelet.status(container_id)).state == api_pb2.CONTAINER_RUNNING
    fleet.vms[view.uid] = view


async def test_a_new_pod_needs_the_bus(fleet: Fleet, kubelet: Kubelet) -> None:
    await kubelet.call("PullImage", image={"image": "tiny"})
    sandbox_id = await kubelet.sandbox()
    await cut(fleet, kubelet)
    code, text = await kubelet.refused(
        "CreateContainer",
        pod_sandbox_id=sandbox_id,
        config={"metadata": {"name": "vm"}, "image": {"image": DIGEST}},
    )
    assert (code, "bus is away" in text) == (StatusCode.UNAVAILABLE, True)
    assert not (await kubelet.call("ListContainers")).containers
    other = {"name": "db", "uid": "77", "namespace": "default"}
    code, text = await kubelet.refused("RunPodSandbox", config=sandbox(metadata=other))
    assert (code, "bus is away" in text) == (StatusCode.UNAVAILABLE, True)
    (left,) = (await kubelet.call("ListPodSandbox")).items
    assert left.id == sandbox_id
