"""A sandbox is the network of its pod's VM: made before the guest, and released after it."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from cri_api.v1 import api_pb2
from grpc import StatusCode
from services.cri.tests.world import ADDRESS, DIGEST, Fleet, Kubelet, container, cri, sandbox

from virtbus.schemas.errors import Code, VirtbusError


async def shown(kubelet: Kubelet, sandbox_id: str) -> Any:
    return (await kubelet.call("PodSandboxStatus", pod_sandbox_id=sandbox_id)).status


async def nothing_left(fleet: Fleet, kubelet: Kubelet) -> None:
    """Return once the bus has no VM and the node no sandbox."""
    async with asyncio.timeout(10):
        while fleet.vms:
            await kubelet.call("Version")
    assert not (await kubelet.call("ListPodSandbox")).items


async def test_a_sandbox_has_its_address_before_its_container(
    fleet: Fleet, kubelet: Kubelet
) -> None:
    """kubelet gives it to the container as `status.podIP`."""
    sandbox_id = await kubelet.sandbox()
    status = await shown(kubelet, sandbox_id)
    assert (status.state, status.network.ip) == (api_pb2.SANDBOX_READY, ADDRESS)
    assert (fleet.vm.powered, fleet.vm.spec.volumes) == (False, ())
    uid = fleet.vm.uid
    container_id = await kubelet.container(sandbox_id)
    await kubelet.call("StartContainer", container_id=container_id)
    assert fleet.vm.uid == uid
    answer = await kubelet.call("PodSandboxStatus", pod_sandbox_id=sandbox_id, verbose=True)
    assert answer.status.network.ip == ADDRESS
    assert ADDRESS in answer.info["info"]
    asked = [name for name, _data in fleet.requests if name.startswith("vm.")]
    assert asked == ["vm.create", "vm.create", "vm.start"]


async def test_a_sandbox_without_an_address_has_no_network_in_its_status(
    fleet: Fleet, kubelet: Kubelet
) -> None:
    """kubelet replaces a sandbox that has one with an empty address."""
    fleet.address = ""
    status = await shown(kubelet, await kubelet.sandbox())
    assert (status.state, status.HasField("network")) == (api_pb2.SANDBOX_READY, False)


async def test_a_network_that_fails_fails_the_sandbox_and_leaves_nothing(
    fleet: Fleet, kubelet: Kubelet
) -> None:
    fleet.network_error = "plugin bridge: no address is free"
    code, text = await kubelet.refused("RunPodSandbox", config=sandbox())
    assert code is StatusCode.INTERNAL
    assert text == "network (cni_failed): plugin bridge: no address is free"
    await nothing_left(fleet, kubelet)
    fleet.network_error = ""
    assert (await shown(kubelet, await kubelet.sandbox())).network.ip == ADDRESS


async def test_a_network_that_is_not_made_in_time_leaves_nothing(
    fleet: Fleet, kubelet: Kubelet
) -> None:
    fleet.networks = False
    code, text = await kubelet.refused("RunPodSandbox", config=sandbox(), timeout_s=2)
    assert (code, "network_slow" in text) == (StatusCode.DEADLINE_EXCEEDED, True)
    await nothing_left(fleet, kubelet)


async def test_a_cancelled_sandbox_leaves_nothing(fleet: Fleet, kubelet: Kubelet) -> None:
    fleet.networks = False
    call = asyncio.Task(kubelet.call("RunPodSandbox", config=sandbox()))
    while not fleet.vms:
        await asyncio.sleep(0.01)
    call.cancel()
    await asyncio.wait([call])
    await nothing_left(fleet, kubelet)


async def test_a_create_of_a_network_without_an_answer_leaves_nothing(
    fleet: Fleet, kubelet: Kubelet
) -> None:
    fleet.errors["vm.create"] = VirtbusError(Code.DEADLINE, "late", "no answer")
    await kubelet.refused("RunPodSandbox", config=sandbox())
    while not fleet.asked("vm.delete"):
        await kubelet.call("Version")
    assert fleet.asked("vm.delete")[0]["uid"] == fleet.asked("vm.create")[0]["uid"]


async def test_a_kill_while_a_network_is_made_leaves_nothing(tmp_path: Path, fleet: Fleet) -> None:
    """The record of the pod is on disk before the request, and names its VM."""
    fleet.networks = False
    pods = tmp_path / "state" / "cri" / "pods"
    async with cri(tmp_path, fleet) as kubelet:
        call = asyncio.Task(kubelet.call("RunPodSandbox", config=sandbox()))
        while not fleet.vms:
            await asyncio.sleep(0.01)
        (record,) = pods.glob("*.json")
        body, views = record.read_bytes(), dict(fleet.vms)
        call.cancel()
        await asyncio.wait([call])
        await nothing_left(fleet, kubelet)
    record.write_bytes(body)  # as after `kill -9`
    fleet.vms.update(views)
    async with cri(tmp_path, fleet) as kubelet:
        await nothing_left(fleet, kubelet)
    assert not list(pods.glob("*.json"))


async def test_a_stopped_sandbox_releases_its_network_and_the_next_one_holds_it(
    fleet: Fleet, kubelet: Kubelet
) -> None:
    first, container_id = await kubelet.running()
    uid = fleet.vm.uid
    for _repeat in range(2):
        await kubelet.call("StopPodSandbox", pod_sandbox_id=first)
    assert (fleet.vm.spec.network_state, fleet.vm.interfaces) == ("Released", ())
    assert len(fleet.asked("vm.update")) == 1
    assert not (await shown(kubelet, first)).HasField("network")
    assert (await kubelet.status(container_id)).state == api_pb2.CONTAINER_EXITED
    fleet.address = "10.80.0.77"
    second = await kubelet.sandbox(attempt=1)
    assert (await shown(kubelet, second)).network.ip == "10.80.0.77"
    assert (fleet.vm.uid, fleet.vm.spec.network_state) == (uid, "Held")
    assert fleet.vm.spec.volumes, "the root disk stays"
    await kubelet.call("RemovePodSandbox", pod_sandbox_id=first)
    assert fleet.vm.spec.network_state == "Held"
    await kubelet.call("StartContainer", container_id=await kubelet.container(second, attempt=1))
    assert fleet.vm.uid == uid


async def test_the_network_of_a_guest_that_ended_by_itself_is_released(
    fleet: Fleet, kubelet: Kubelet
) -> None:
    """kubelet stops the sandbox of a pod that has completed, and keeps it."""
    sandbox_id, container_id = await kubelet.running()
    fleet.end("shut down")
    await kubelet.until_state(container_id, api_pb2.CONTAINER_EXITED)
    await kubelet.call("StopPodSandbox", pod_sandbox_id=sandbox_id)
    assert (fleet.vm.powered, fleet.vm.spec.network_state) == (False, "Released")


async def test_a_second_attempt_whose_network_fails_keeps_the_disks(
    fleet: Fleet, kubelet: Kubelet
) -> None:
    first, _ = await kubelet.running()
    uid = fleet.vm.uid
    await kubelet.call("StopPodSandbox", pod_sandbox_id=first)
    fleet.network_error = "no"
    code, _ = await kubelet.refused("RunPodSandbox", config=sandbox(attempt=1))
    assert code is StatusCode.INTERNAL
    async with asyncio.timeout(10):
        while fleet.vm.spec.network_state != "Released":
            await kubelet.call("Version")
    fleet.network_error = ""
    second = await kubelet.sandbox(attempt=1)
    assert (fleet.vm.uid, (await shown(kubelet, second)).network.ip) == (uid, ADDRESS)


async def test_a_sandbox_that_is_stopped_without_the_bus_is_released_later(
    tmp_path: Path, fleet: Fleet
) -> None:
    async with cri(tmp_path, fleet) as kubelet:
        sandbox_id = await kubelet.sandbox()
        fleet.cut()
        await kubelet.call("StopPodSandbox", pod_sandbox_id=sandbox_id)
    fleet.mend()
    async with cri(tmp_path, fleet) as kubelet, asyncio.timeout(10):
        while fleet.vm.spec.network_state != "Released":
            await kubelet.call("Version")


async def test_a_vm_that_is_gone_is_made_again_for_the_next_sandbox(
    fleet: Fleet, kubelet: Kubelet
) -> None:
    first, _ = await kubelet.running()
    uid = fleet.vm.uid
    await kubelet.call("StopPodSandbox", pod_sandbox_id=first)
    fleet.remove(uid)
    second = await kubelet.sandbox(attempt=1)
    assert (fleet.vm.uid == uid, (await shown(kubelet, second)).network.ip) == (False, ADDRESS)


@pytest.mark.parametrize(
    ("code", "reason", "keeps"),
    [
        (Code.CONFLICT, "volume_in_use", True),  # by the VM of a former pod, which ends now
        (Code.CONFLICT, "deleting", True),
        (Code.NOT_FOUND, "image_unknown", True),
        (Code.CONFLICT, "uid_taken", False),
        (Code.GONE, "deleted", False),
    ],
)
async def test_a_container_that_is_refused_for_now_keeps_the_network_of_its_sandbox(
    fleet: Fleet, kubelet: Kubelet, code: Code, reason: str, keeps: bool
) -> None:
    sandbox_id = await kubelet.sandbox()
    uid = fleet.vm.uid
    await kubelet.call("PullImage", image={"image": "tiny"})
    fleet.errors["vm.create"] = VirtbusError(code, reason, "not now")
    config = container(image={"image": DIGEST})
    await kubelet.refused("CreateContainer", pod_sandbox_id=sandbox_id, config=config)
    del fleet.errors["vm.create"]
    if keeps:
        assert (await shown(kubelet, sandbox_id)).network.ip == ADDRESS
    await kubelet.container(sandbox_id)
    while len(fleet.vms) > 1:
        await asyncio.sleep(0.01)
    assert (fleet.vm.uid == uid, fleet.vm.spec.network_state) == (keeps, "Held")
    assert (await shown(kubelet, sandbox_id)).network.ip == ADDRESS
