"""A call that kubelet gives up leaves nothing behind."""

import asyncio

import pytest
from services.cri.tests.world import Fleet, Kubelet, container, sandbox

from virtbus.cri.core.answers import Plain

CREATED, RUNNING, EXITED = 0, 1, 2


@pytest.mark.parametrize(
    ("call", "request_name"),
    [
        ("PullImage", "image.pull"),
        ("CreateContainer", "vm.create"),
        ("StartContainer", "vm.start"),
        ("StopContainer", "vm.stop"),
        ("RemoveContainer", "vm.stop"),
        ("UpdateContainerResources", "vm.update"),
        ("StopPodSandbox", "vm.stop"),
        ("StopPodSandbox", "vm.update"),
        ("RemovePodSandbox", "vm.stop"),
    ],
)
async def test_a_cancelled_call_can_be_repeated_and_its_pod_leaves_nothing(
    fleet: Fleet, kubelet: Kubelet, call: str, request_name: str
) -> None:
    pulled = await kubelet.call("PullImage", image={"image": "tiny:latest"})
    sandbox_id = await kubelet.sandbox()
    made = {
        "pod_sandbox_id": sandbox_id,
        "config": container(image={"image": pulled.image_ref}),
        "sandbox_config": sandbox(),
    }
    arguments: dict[str, Plain] = {
        "PullImage": {"image": {"image": "tiny:latest"}},
        "CreateContainer": made,
    }
    if call not in arguments:
        container_id = await kubelet.container(sandbox_id)
        if call != "StartContainer":
            await kubelet.call("StartContainer", container_id=container_id)
        of_pod = call.endswith("PodSandbox")
        field, key = ("pod_sandbox_id", sandbox_id) if of_pod else ("container_id", container_id)
        arguments[call] = {field: key}
    if call == "UpdateContainerResources":
        arguments[call]["linux"] = {"cpu_shares": 77}
    before = len(fleet.asked(request_name))
    fleet.held[request_name] = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        given_up = group.create_task(kubelet.call(call, **arguments[call]))
        while len(fleet.asked(request_name)) == before:
            await asyncio.sleep(0.01)
        given_up.cancel()
    fleet.held.pop(request_name).set()
    await kubelet.call(call, **arguments[call])
    await kubelet.call("StopPodSandbox", pod_sandbox_id=sandbox_id)
    await kubelet.call("RemovePodSandbox", pod_sandbox_id=sandbox_id)
    while fleet.vms:
        await asyncio.sleep(0.01)
    assert not (await kubelet.call("ListContainers")).containers
    assert not (await kubelet.call("ListPodSandbox")).items


async def test_a_command_that_kubelet_gives_up_leaves_its_place_to_the_next_one(
    fleet: Fleet, kubelet: Kubelet
) -> None:
    _, container_id = await kubelet.running()
    fleet.agent.hangs = True
    async with asyncio.TaskGroup() as group:
        given_up = [
            group.create_task(kubelet.call("ExecSync", container_id=container_id, cmd=["true"]))
            for _ in range(3)
        ]
        while not fleet.agent.running:
            await asyncio.sleep(0.01)
        for one in given_up:
            one.cancel()
    fleet.agent.hangs = False
    done = await kubelet.call("ExecSync", container_id=container_id, cmd=["true"], timeout_s=5)
    assert done.exit_code == 3
