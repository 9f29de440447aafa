"""A runtime that is away: its last lists are served and marked, never shorter ones."""

import asyncio
import time
from contextlib import suppress

import grpc
import pytest
from cri_api.v1 import api_pb2
from services.criproxy.tests.world import FakeRuntime, Node, until

AWAY = grpc.StatusCode.UNAVAILABLE


def runtime(node: Node, *, vm: bool) -> FakeRuntime:
    return node.vms if vm else node.containers


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("vm", [False, True])
async def test_lists_of_a_dead_runtime_stay_whole(node: Node, vm: bool, restarts: bool) -> None:
    pods = [await node.pod("vm", vm=True), await node.pod("box", vm=False)]
    await node.call("PullImage", image={"image": "virtlet.cloud/tiny"})
    await node.call("PullImage", image={"image": "busybox"})
    await node.settled()
    await runtime(node, vm=vm).stop()
    if restarts:
        await node.restart()
    assert await node.sandboxes() == {box for box, _ in pods}
    assert await node.listed() == {container for _, container in pods}
    assert len((await node.call("ListImages")).images) == 2
    assert len((await node.call("ListContainerStats")).stats) == 2
    assert len((await node.call("ImageFsInfo")).image_filesystems) == 2
    assert (await node.call("Version")).runtime_name == "containerd"


async def test_a_pod_made_just_before_the_death_is_in_the_list(node: Node) -> None:
    await node.settled()
    box, _ = await node.pod("web", vm=True, container=False)
    config = {"metadata": {"name": "c"}, "labels": {"a": "b"}}
    made = await node.call("CreateContainer", pod_sandbox_id=box, config=config)
    await node.vms.stop()
    await node.restart()
    answer = await node.call("ListContainers")
    assert [(one.id, one.pod_sandbox_id, dict(one.labels)) for one in answer.containers] == [
        (made.container_id, box, {"a": "b"})
    ]
    (item,) = (await node.call("ListPodSandbox")).items
    assert (item.id, item.metadata.uid, item.runtime_handler) == (box, "uid-web", "virtbus")


async def test_a_removed_pod_is_not_in_the_list_of_a_dead_runtime(node: Node) -> None:
    box, _ = await node.pod("web", vm=True)
    await node.settled()
    await node.call("RemovePodSandbox", pod_sandbox_id=box)
    await node.vms.stop()
    assert await node.sandboxes() == set()
    assert await node.listed() == set()


async def test_filters_hold_for_the_last_lists(node: Node) -> None:
    box, container = await node.pod("web", vm=True)
    other, _ = await node.pod("db", vm=True)
    await node.call("StopPodSandbox", pod_sandbox_id=other)
    await node.settled()
    await node.vms.stop()
    assert await node.sandboxes(state={"state": "SANDBOX_READY"}) == {box}
    assert await node.sandboxes(state={"state": "SANDBOX_NOTREADY"}) == {other}
    assert await node.sandboxes(label_selector={"app": "db"}) == {other}
    assert await node.listed(pod_sandbox_id=box, state={"state": "CONTAINER_RUNNING"}) == {
        container
    }
    assert await node.listed(id=container) == {container}
    stats = await node.call("ListContainerStats", filter={"pod_sandbox_id": box})
    assert [one.attributes.id for one in stats.stats] == [container]


async def test_the_status_of_a_pod_in_a_dead_runtime_is_marked_as_the_last_known(
    node: Node,
) -> None:
    box, container = await node.pod("web", vm=True)
    await node.settled()
    await node.call("ContainerStatus", container_id=container)
    await node.call("PodSandboxStatus", pod_sandbox_id=box)
    await node.settled()
    await node.vms.stop()
    await node.restart()
    told = await node.call("ContainerStatus", container_id=container)
    assert told.status.state == api_pb2.CONTAINER_RUNNING
    assert "does not answer" in told.info["virtbus.io/stale"]
    assert (await node.call("PodSandboxStatus", pod_sandbox_id=box)).status.id == box


async def test_a_status_after_a_change_is_never_an_earlier_one(node: Node) -> None:
    _, container = await node.pod("web", vm=True)
    await node.settled()
    await node.call("ContainerStatus", container_id=container)
    await node.call("StopContainer", container_id=container)
    await node.settled()
    await node.vms.stop()
    told = await node.call("ContainerStatus", container_id=container)
    assert told.status.state == api_pb2.CONTAINER_EXITED


async def test_what_needs_the_dead_runtime_is_refused_and_the_other_one_works(node: Node) -> None:
    box, container = await node.pod("web", vm=True)
    await node.settled()
    await node.vms.stop()
    for name, key in (("StopContainer", container), ("RemoveContainer", container)):
        assert (await node.refused(name, container_id=key))[0] == AWAY
    assert (await node.refused("StopPodSandbox", pod_sandbox_id=box))[0] == AWAY
    code, _ = await node.refused(
        "RunPodSandbox", config={"metadata": {"name": "x"}}, runtime_handler="virtbus"
    )
    assert code == AWAY
    assert box in await node.sandboxes()
    await node.pod("box", vm=False)
    assert not (await node.call("ImageStatus", image={"image": "new"})).HasField("image")


async def test_a_dead_runtime_of_vms_is_a_condition_and_the_node_stays_ready(node: Node) -> None:
    await node.settled()
    await node.vms.stop()
    assert (await node.condition("RuntimeReady")).status
    told = await node.condition("virtbus.io/Runtime-vms")
    assert (told.status, told.reason) == (False, "Away")
    assert "its last lists and statuses are served" in told.message
    await node.vms.start()
    await node.back("virtbus.io/Runtime-vms")


async def test_a_dead_runtime_of_containers_is_told_after_its_time_to_restart(node: Node) -> None:
    await node.settled()
    await node.containers.stop()
    told = await node.condition("RuntimeReady")
    assert (told.status, told.reason) == (False, "Away")
    await node.end()
    node.settings = node.settings.model_copy(update={"away_grace_s": 60.0})
    await node.start()
    assert (await node.refused("Status"))[0] == AWAY


async def test_a_list_that_was_never_known_is_an_error_and_not_a_short_list(node: Node) -> None:
    await node.pod("box", vm=False)
    await node.vms.stop()
    code, text = await node.refused("ListPodSandbox")
    assert code == AWAY
    assert "its last ListPodSandbox is not known; start it" in text
    code, _ = await node.refused("RemovePodSandbox", pod_sandbox_id="unknown")
    assert code == AWAY


async def test_a_torn_file_counts_as_unknown(node: Node) -> None:
    await node.pod("web", vm=True)
    await node.settled()
    await node.vms.stop()
    await node.end()
    path = node.folder / "state" / "criproxy" / "vms" / "ListPodSandbox"
    path.write_bytes(path.read_bytes()[:-3])
    await node.start()
    assert (await node.refused("ListPodSandbox"))[0] == AWAY
    assert await node.listed()
    await node.vms.start()
    await node.back("virtbus.io/Runtime-vms")
    assert await node.sandboxes()


async def test_the_files_of_this_version_are_read_by_later_ones(node: Node) -> None:
    """The bytes are those of 0.2.0: a sandbox `old` of the runtime of VMs."""
    await node.settled()
    await node.vms.stop()
    await node.end()
    path = node.folder / "state" / "criproxy" / "vms" / "ListPodSandbox"
    length, checksum = b"\x00\x00\x00\x0e", b"k\xbe'\xc8"
    element = b"\x0a\x03old\x12\x07\x0a\x01w\x12\x02u1"
    path.write_bytes(b"virtbus last answers 1\n" + checksum + length + element)
    await node.start()
    assert await node.sandboxes() == {"old"}


async def test_a_runtime_that_hangs_delays_a_list_by_the_limit_only(node: Node) -> None:
    _, container = await node.pod("web", vm=True)
    await node.settled()
    node.vms.hangs.add("ListContainers")
    began = time.monotonic()
    assert await node.listed() == {container}
    assert time.monotonic() - began < 4
    await until(lambda: node.vms.cancelled == ["ListContainers"], "the runtime's call ended")


@pytest.mark.parametrize("code", [grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN])
async def test_a_list_that_fails_is_replaced_by_the_last_one(
    node: Node, code: grpc.StatusCode
) -> None:
    _, container = await node.pod("web", vm=True)
    await node.settled()
    node.vms.errors["ListContainers"] = (code, "database is locked")
    assert await node.listed() == {container}


async def test_a_list_during_a_change_neither_loses_nor_revives_a_pod(node: Node) -> None:
    _, old = await node.pod("old", vm=True)
    await node.settled()
    earlier = node.vms.answers
    before = api_pb2.ListContainersResponse(containers=list(node.vms.containers.values()))
    earlier["ListContainers"] = lambda _: before  # the list was made before both changes
    node.vms.hangs.add("StopContainer")
    box, new = await node.pod("new", vm=True)
    await node.call("RemoveContainer", container_id=old)
    # a change in flight while the list runs: Remove of an unknown id that never ends
    node.vms.hangs.add("RemovePodSandbox")
    removal = asyncio.Task(node.call("RemovePodSandbox", pod_sandbox_id=box))
    while not node.vms.count("RemovePodSandbox"):
        await node.call("Version")
    await node.settled()
    await node.vms.stop()
    removal.cancel()
    with suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
        await removal
    assert await node.listed() == {new}
