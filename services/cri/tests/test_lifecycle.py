"""A pod is a VM: its sandboxes, its container, and the VM's end."""

import asyncio
from pathlib import Path

import pytest
from cri_api.v1 import api_pb2
from grpc import StatusCode
from services.cri.tests.world import (
    AT_NS,
    DIGEST,
    OTHER_DIGEST,
    Fleet,
    Kubelet,
    container,
    cri,
    sandbox,
)

from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.states import VmState

CREATED, RUNNING, EXITED = (
    api_pb2.CONTAINER_CREATED,
    api_pb2.CONTAINER_RUNNING,
    api_pb2.CONTAINER_EXITED,
)


async def test_a_pod_lives_and_leaves_nothing(fleet: Fleet, kubelet: Kubelet) -> None:
    sandbox_id, container_id = await kubelet.running()
    status = await kubelet.status(container_id)
    assert (status.state, status.metadata.name, status.image_ref) == (RUNNING, "vm", DIGEST)
    assert status.created_at > 0
    assert status.started_at > AT_NS
    await kubelet.call("StopContainer", container_id=container_id, timeout=3)
    status = await kubelet.status(container_id)
    assert (status.state, status.exit_code, status.reason) == (EXITED, 0, "Completed")
    assert status.finished_at > status.started_at
    assert fleet.asked("vm.stop")[0]["grace_s"] == 3
    await kubelet.call("StopPodSandbox", pod_sandbox_id=sandbox_id)
    await kubelet.call("RemoveContainer", container_id=container_id)
    assert fleet.vms, "the disks stay until the pod is removed"
    await kubelet.call("RemovePodSandbox", pod_sandbox_id=sandbox_id)
    while fleet.vms:
        await kubelet.call("Version")
    assert not (await kubelet.call("ListPodSandbox")).items
    assert not (await kubelet.call("ListContainers")).containers


async def test_the_vm_has_the_identity_of_the_pod(fleet: Fleet, kubelet: Kubelet) -> None:
    sandbox_id = await kubelet.sandbox()
    await kubelet.container(sandbox_id)
    vm = fleet.vm
    assert vm.name.startswith("web-")
    assert vm.labels == {
        "io.kubernetes.pod.name": "web",
        "io.kubernetes.pod.namespace": "default",
        "io.kubernetes.pod.uid": "0c5f",
        "io.kubernetes.container.name": "vm",
        "virtbus.io/cri-attempt": "0",
    }
    assert vm.spec.node_selector == {"kubernetes.io/hostname": "worker-1"}
    assert (vm.spec.run_strategy, vm.spec.eviction_strategy) == ("Manual", "External")
    assert not vm.powered


async def test_a_container_shows_the_image_that_its_manifest_names(kubelet: Kubelet) -> None:
    image = {"image": DIGEST, "user_specified_image": "virtlet.cloud/tiny"}
    container_id = await kubelet.container(await kubelet.sandbox(), image=image)
    status = await kubelet.status(container_id)
    assert (status.image.image, status.image_ref) == ("virtlet.cloud/tiny", DIGEST)


@pytest.mark.parametrize(
    ("how", "exit_code", "reason"),
    [
        ("shut down", 0, "Completed"),
        ("ended", 137, "Error"),
        ("crashed", 134, "EmulatorDied"),
        ("panicked", 1, "GuestPanicked"),
        ("watchdog", 124, "WatchdogExpired"),
    ],
)
async def test_an_exit_says_how_the_guest_ended(
    fleet: Fleet, kubelet: Kubelet, how: str, exit_code: int, reason: str
) -> None:
    _, container_id = await kubelet.running()
    at_ns = fleet.end(how).last_exit
    status = await kubelet.until_state(container_id, EXITED)
    assert (status.exit_code, status.reason) == (exit_code, reason)
    assert at_ns is not None
    assert status.finished_at == at_ns.at_ns
    while fleet.vm.powered:  # the VM's record says what kubelet knows: the container has exited
        await kubelet.call("Version")


async def test_the_root_disk_survives_the_attempts_of_a_container(
    fleet: Fleet, kubelet: Kubelet
) -> None:
    sandbox_id, container_id = await kubelet.running()
    uid = fleet.vm.uid
    fleet.end("crashed")
    await kubelet.until_state(container_id, EXITED)
    second = await kubelet.container(sandbox_id, attempt=1)
    await kubelet.call("StartContainer", container_id=second)
    assert (fleet.vm.uid, fleet.vm.labels["virtbus.io/cri-attempt"]) == (uid, "1")
    assert (await kubelet.status(container_id)).reason == "EmulatorDied"
    assert (await kubelet.status(second)).state == RUNNING
    await kubelet.call("RemoveContainer", container_id=container_id)
    assert (await kubelet.status(second)).state == RUNNING


async def test_the_vm_survives_a_new_sandbox_of_its_pod(fleet: Fleet, kubelet: Kubelet) -> None:
    first, _ = await kubelet.running()
    uid = fleet.vm.uid
    await kubelet.call("StopPodSandbox", pod_sandbox_id=first)
    second = await kubelet.sandbox(attempt=1)
    await kubelet.call("StartContainer", container_id=await kubelet.container(second, attempt=1))
    await kubelet.call("RemovePodSandbox", pod_sandbox_id=first)
    assert (fleet.vm.uid, fleet.vm.state) == (uid, VmState.RUNNING)
    assert len((await kubelet.call("ListContainers")).containers) == 1


async def test_another_image_means_another_vm(fleet: Fleet, kubelet: Kubelet) -> None:
    sandbox_id, container_id = await kubelet.running()
    uid = fleet.vm.uid
    await kubelet.call("StopContainer", container_id=container_id)
    second = await kubelet.container(sandbox_id, attempt=1, pull="other")
    while uid in fleet.vms:
        await kubelet.call("Version")
    assert fleet.vm.spec.volumes[0].image_ref == f"other@{OTHER_DIGEST}"
    assert (await kubelet.status(second)).image_ref == OTHER_DIGEST


async def test_a_tag_that_moves_keeps_the_root_disk(fleet: Fleet, kubelet: Kubelet) -> None:
    """kubelet pulls an image again before each attempt if the policy is Always."""
    sandbox_id = await kubelet.sandbox()
    uid = None
    for attempt, digest in enumerate((DIGEST, OTHER_DIGEST, OTHER_DIGEST)):
        fleet.images["tiny"] = digest
        pulled = (await kubelet.call("PullImage", image={"image": "tiny"})).image_ref
        assert pulled == digest
        image = {"image": pulled, "user_specified_image": "tiny"}
        container_id = await kubelet.container(sandbox_id, attempt, image=image)
        await kubelet.call("StartContainer", container_id=container_id)
        uid = uid or fleet.vm.uid
        status = await kubelet.status(container_id)
        assert (fleet.vm.uid, status.image_ref) == (uid, DIGEST), "the digest of its disk"
        await kubelet.call("StopContainer", container_id=container_id)


async def test_a_name_in_place_of_another_for_the_same_image_keeps_the_root_disk(
    fleet: Fleet, kubelet: Kubelet
) -> None:
    sandbox_id, container_id = await kubelet.running()
    uid = fleet.vm.uid
    await kubelet.call("StopContainer", container_id=container_id)
    fleet.images["tiny"] = OTHER_DIGEST
    for attempt, (image, digest) in enumerate((("new", DIGEST), ("new", OTHER_DIGEST)), 1):
        fleet.images["new"] = digest
        pulled = (await kubelet.call("PullImage", image={"image": "new"})).image_ref
        named = {"image": pulled, "user_specified_image": image}
        await kubelet.container(sandbox_id, attempt, image=named)
    assert fleet.vm.uid == uid


async def test_a_repeated_call_changes_nothing(fleet: Fleet, kubelet: Kubelet) -> None:
    sandbox_id, container_id = await kubelet.running()
    assert await kubelet.sandbox() == sandbox_id
    assert await kubelet.container(sandbox_id) == container_id
    await kubelet.call("StartContainer", container_id=container_id)
    assert [len(fleet.asked(name)) for name in ("vm.create", "vm.start")] == [2, 1]
    for _ in range(2):
        await kubelet.call("StopContainer", container_id=container_id)
        await kubelet.call("StopPodSandbox", pod_sandbox_id=sandbox_id)
    assert len(fleet.asked("vm.stop")) == 1
    for _ in range(2):
        await kubelet.call("RemoveContainer", container_id=container_id)
        await kubelet.call("RemovePodSandbox", pod_sandbox_id=sandbox_id)


async def test_unknown_ids_are_not_found_or_already_gone(kubelet: Kubelet) -> None:
    for name in ("StopContainer", "RemoveContainer"):
        await kubelet.call(name, container_id="nobody")
    for name in ("StopPodSandbox", "RemovePodSandbox"):
        await kubelet.call(name, pod_sandbox_id="nobody")
    for name in ("ContainerStatus", "StartContainer", "ReopenContainerLog"):
        assert (await kubelet.refused(name, container_id="nobody"))[0] is StatusCode.NOT_FOUND
    code, _ = await kubelet.refused("PodSandboxStatus", pod_sandbox_id="nobody")
    assert code is StatusCode.NOT_FOUND


async def test_a_failed_start_ends_the_container_with_its_cause(
    fleet: Fleet, kubelet: Kubelet
) -> None:
    sandbox_id = await kubelet.sandbox()
    container_id = await kubelet.container(sandbox_id)
    fleet.boots = False
    uid = fleet.vm.uid
    show = fleet.show

    def fail(changed: str, **fields: object) -> object:
        view = show(changed, **fields)
        if view.powered and not view.power_observed:
            show(uid, state=VmState.FAILED, power_observed=True, message="no memory is free")
        return view

    fleet.show = fail  # type: ignore[method-assign,assignment]
    code, text = await kubelet.refused("StartContainer", container_id=container_id)
    assert (code, "no memory is free" in text) == (StatusCode.INTERNAL, True)
    status = await kubelet.status(container_id)
    assert (status.state, status.exit_code, status.reason) == (EXITED, 128, "StartError")


async def test_a_guest_that_does_not_start_can_be_stopped_meanwhile(
    fleet: Fleet, kubelet: Kubelet
) -> None:
    sandbox_id = await kubelet.sandbox()
    container_id = await kubelet.container(sandbox_id)
    fleet.boots = False
    async with asyncio.TaskGroup() as group:
        start = group.create_task(kubelet.refused("StartContainer", container_id=container_id))
        while not fleet.asked("vm.start"):
            await asyncio.sleep(0.01)
        fleet.boots = True
        await kubelet.call("StopPodSandbox", pod_sandbox_id=sandbox_id)
    assert start.result()[0] is StatusCode.INTERNAL
    assert (await kubelet.status(container_id)).state == EXITED


async def test_a_start_honours_the_deadline_of_its_caller(fleet: Fleet, kubelet: Kubelet) -> None:
    container_id = await kubelet.container(await kubelet.sandbox())
    fleet.boots = False
    code, text = await kubelet.refused("StartContainer", container_id=container_id, timeout_s=2)
    assert (code, "does not run" in text) == (StatusCode.DEADLINE_EXCEEDED, True)
    assert (await kubelet.status(container_id)).state == CREATED


async def test_an_old_view_does_not_end_a_starting_container(
    fleet: Fleet, kubelet: Kubelet
) -> None:
    sandbox_id, first = await kubelet.running()
    await kubelet.call("StopContainer", container_id=first)
    old = fleet.vm
    container_id = await kubelet.container(sandbox_id, attempt=1)
    await kubelet.call("StartContainer", container_id=container_id)
    new = fleet.vm
    fleet.put(old)  # a controller that lags behind
    fleet.put(new)
    await kubelet.call("ListContainers")
    assert (await kubelet.status(container_id)).state == RUNNING


async def test_a_view_of_the_vm_before_its_start_does_not_end_a_starting_container(
    fleet: Fleet, kubelet: Kubelet
) -> None:
    """The view arrives between the request of the start and its answer."""
    container_id = await kubelet.container(await kubelet.sandbox())
    fleet.held["vm.start"] = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        start = group.create_task(kubelet.call("StartContainer", container_id=container_id))
        while not fleet.asked("vm.start"):
            await asyncio.sleep(0.01)
        fleet.put(fleet.vm)
        await kubelet.call("ListContainers")
        await asyncio.sleep(0.05)
        fleet.held["vm.start"].set()
        await start
    assert (await kubelet.status(container_id)).state == RUNNING


async def test_an_unreachable_node_ends_no_container(fleet: Fleet, kubelet: Kubelet) -> None:
    _, container_id = await kubelet.running()
    fleet.show(fleet.vm.uid, state=VmState.UNKNOWN)
    await kubelet.call("ListContainers")
    assert (await kubelet.status(container_id)).state == RUNNING


async def test_a_vm_that_somebody_deletes_ends_its_container(
    fleet: Fleet, kubelet: Kubelet
) -> None:
    sandbox_id, container_id = await kubelet.running()
    fleet.remove(fleet.vm.uid)
    status = await kubelet.until_state(container_id, EXITED)
    assert status.reason == "VmDeleted"
    await kubelet.container(sandbox_id, attempt=1)
    assert fleet.vm.powered is False


async def test_a_refused_create_leaves_no_container(fleet: Fleet, kubelet: Kubelet) -> None:
    sandbox_id = await kubelet.sandbox()
    await kubelet.call("PullImage", image={"image": "tiny"})
    fleet.errors["vm.create"] = VirtbusError(Code.INVALID, "invalid", "spec.x: is wrong")
    for _ in range(2):
        code, text = await kubelet.refused(
            "CreateContainer",
            pod_sandbox_id=sandbox_id,
            config=container(image={"image": DIGEST}),
        )
        assert (code, text) == (StatusCode.INVALID_ARGUMENT, "pod (invalid): spec.x: is wrong")
    assert len({data["uid"] for data in fleet.asked("vm.create")}) == 1
    del fleet.errors["vm.create"]
    assert not (await kubelet.call("ListContainers")).containers
    await kubelet.container(sandbox_id)
    assert len(fleet.vms) == 1


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"metadata": {"name": "second"}}, "one container"),
        ({"mounts": [{"container_path": "/data", "host_path": "/d"}]}, "/data"),
        ({"devices": [{"container_path": "/dev/x", "host_path": "/dev/x"}]}, "/dev/x"),
        ({"metadata": {"name": ""}}, "name"),
        ({"envs": [{"key": "A", "value": "1\n2"}]}, "environment"),
        ({"linux": {"resources": {"memory_limit_in_bytes": 4096}}}, "memory"),
    ],
)
async def test_a_container_that_cannot_be_a_guest_is_refused_early(
    fleet: Fleet, kubelet: Kubelet, changes: dict[str, object], why: str
) -> None:
    sandbox_id = await kubelet.sandbox()
    if why == "one container":
        await kubelet.container(sandbox_id)
    await kubelet.call("PullImage", image={"image": "tiny"})
    before = len(fleet.vms)
    config = container(image={"image": DIGEST}) | changes
    code, text = await kubelet.refused("CreateContainer", pod_sandbox_id=sandbox_id, config=config)
    assert (code, why in text) == (StatusCode.INVALID_ARGUMENT, True), text
    assert len(fleet.vms) == before


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        ({"config": sandbox(metadata={})}, "a name"),
        ({}, "a name"),
        ({"config": sandbox(), "runtime_handler": "runc"}, "runc"),
        (
            {
                "config": sandbox(
                    linux={"security_context": {"namespace_options": {"network": "NODE"}}}
                )
            },
            "hostNetwork",
        ),
    ],
    ids=["no identity", "nothing", "another handler", "host network"],
)
async def test_a_sandbox_that_cannot_be_a_vm_is_refused(
    kubelet: Kubelet, request_: dict[str, object], why: str
) -> None:
    code, text = await kubelet.refused("RunPodSandbox", **request_)
    assert (code, why in text) == (StatusCode.INVALID_ARGUMENT, True), text
    assert not (await kubelet.call("ListPodSandbox")).items


async def test_a_removal_that_cannot_end_the_guest_fails_and_keeps_the_container(
    fleet: Fleet, kubelet: Kubelet
) -> None:
    _, container_id = await kubelet.running()
    fleet.errors["vm.stop"] = VirtbusError(Code.INTERNAL, "libvirt_failed", "the test says so")
    code, text = await kubelet.refused("RemoveContainer", container_id=container_id)
    assert (code, "the test says so" in text) == (StatusCode.INTERNAL, True)
    (listed,) = (await kubelet.call("ListContainers")).containers
    assert listed.id == container_id
    del fleet.errors["vm.stop"]
    await kubelet.call("RemoveContainer", container_id=container_id)
    assert not (await kubelet.call("ListContainers")).containers


async def test_calls_out_of_order_are_refused(kubelet: Kubelet) -> None:
    sandbox_id, container_id = await kubelet.running()
    failed = StatusCode.FAILED_PRECONDITION
    code, _ = await kubelet.refused("RunPodSandbox", config=sandbox(1))
    assert code is failed
    config = container(1, image={"image": DIGEST})
    code, text = await kubelet.refused("CreateContainer", pod_sandbox_id=sandbox_id, config=config)
    assert (code, "stop it" in text) == (failed, True)
    await kubelet.call("StopPodSandbox", pod_sandbox_id=sandbox_id)
    assert (await kubelet.refused("StartContainer", container_id=container_id))[0] is failed
    assert (await kubelet.refused("RunPodSandbox", config=sandbox()))[0] is failed
    code, _ = await kubelet.refused("CreateContainer", pod_sandbox_id=sandbox_id, config=config)
    assert code is failed


async def test_a_second_container_of_a_pod_does_not_start_while_the_first_one_runs(
    fleet: Fleet, kubelet: Kubelet
) -> None:
    sandbox_id = await kubelet.sandbox()
    first, second = [await kubelet.container(sandbox_id, attempt) for attempt in (0, 1)]
    await kubelet.call("StartContainer", container_id=first)
    code, text = await kubelet.refused("StartContainer", container_id=second)
    assert (code, "stop it" in text) == (StatusCode.FAILED_PRECONDITION, True)
    assert len(fleet.asked("vm.start")) == 1


async def test_lists_have_each_filter_of_cri(fleet: Fleet, kubelet: Kubelet) -> None:
    sandbox_id, container_id = await kubelet.running()
    other = {"name": "db", "uid": "77", "namespace": "default"}
    second = await kubelet.sandbox(metadata=other, labels={"app": "db"})
    for wanted, ids in (
        ({}, {sandbox_id, second}),
        ({"id": second}, {second}),
        ({"id": second[:12]}, {second}),
        ({"state": {"state": api_pb2.SANDBOX_READY}}, {sandbox_id, second}),
        ({"state": {"state": api_pb2.SANDBOX_NOTREADY}}, set()),
        ({"label_selector": {"app": "db"}}, {second}),
        ({"id": sandbox_id, "label_selector": {"app": "db"}}, set()),
    ):
        answer = await kubelet.call("ListPodSandbox", filter=wanted)
        assert {one.id for one in answer.items} == ids, wanted
    for filter_, container_ids in (
        ({}, {container_id}),
        ({"pod_sandbox_id": sandbox_id}, {container_id}),
        ({"pod_sandbox_id": second}, set()),
        ({"state": {"state": CREATED}}, set()),
        ({"state": {"state": RUNNING}, "id": container_id}, {container_id}),
        ({"label_selector": {"io.kubernetes.container.name": "vm"}}, {container_id}),
        ({"label_selector": {"io.kubernetes.container.name": "x"}}, set()),
    ):
        listed = await kubelet.call("ListContainers", filter=filter_)
        assert {one.id for one in listed.containers} == container_ids, filter_


async def test_a_kill_during_a_create_makes_no_second_vm(tmp_path: Path, fleet: Fleet) -> None:
    async with cri(tmp_path, fleet) as kubelet:
        sandbox_id = await kubelet.sandbox()
        fleet.errors["vm.create"] = VirtbusError(Code.DEADLINE, "late", "no answer")
        await kubelet.call("PullImage", image={"image": "tiny"})
        await kubelet.refused(
            "CreateContainer",
            pod_sandbox_id=sandbox_id,
            config=container(image={"image": DIGEST}),
        )
    del fleet.errors["vm.create"]
    async with cri(tmp_path, fleet) as kubelet:
        await kubelet.container(sandbox_id)
    assert len({data["uid"] for data in fleet.asked("vm.create")}) == 1


async def test_a_vm_that_is_on_and_still_stopped_does_not_end_its_container(
    fleet: Fleet, kubelet: Kubelet
) -> None:
    container_id = await kubelet.container(await kubelet.sandbox())
    fleet.boots = False
    async with asyncio.TaskGroup() as group:
        start = group.create_task(kubelet.call("StartContainer", container_id=container_id))
        while not fleet.asked("vm.start"):
            await asyncio.sleep(0.01)
        fleet.show(fleet.vm.uid, state=VmState.STOPPED, powered=True, power_observed=True)
        await kubelet.call("Version")
        fleet.show(fleet.vm.uid, state=VmState.RUNNING, started_ns=fleet.tick())
    assert start.exception() is None
    assert (await kubelet.status(container_id)).state == api_pb2.CONTAINER_RUNNING


async def test_an_ended_or_unknown_container_gets_no_resources(kubelet: Kubelet) -> None:
    _, container_id = await kubelet.running()
    await kubelet.call("StopContainer", container_id=container_id)
    wanted = {"linux": {"cpu_shares": 2}}
    code, _ = await kubelet.refused("UpdateContainerResources", container_id=container_id, **wanted)
    assert code is StatusCode.FAILED_PRECONDITION
    code, _ = await kubelet.refused("UpdateContainerResources", container_id="nobody", **wanted)
    assert code is StatusCode.NOT_FOUND
