"""Lists, statuses and events of both runtimes are those of one node."""

import asyncio
import gc
from typing import Any

import grpc
import pytest
from cri_api.v1 import api_pb2
from services.criproxy.tests.world import UNKNOWN_FIELD, Node, until

from virtbus.criproxy.core import calls
from virtbus.criproxy.edge import messages


async def test_lists_have_the_pods_of_both_runtimes(node: Node) -> None:
    boxes = {(await node.pod(name, vm=name == "vm")) for name in ("vm", "box")}
    assert await node.sandboxes() == {box for box, _ in boxes}
    assert await node.listed() == {container for _, container in boxes}
    stats = await node.call("ListContainerStats")
    assert {one.attributes.id for one in stats.stats} == {container for _, container in boxes}


@pytest.mark.parametrize("name", calls.STREAMS)
async def test_a_list_in_parts_has_what_both_lists_have_and_asks_for_no_newer_call(
    node: Node, name: str
) -> None:
    """containerd 1.6 has no call of Kubernetes 1.36. The wire of a part is that of a list."""
    _, container = await node.pod("box", vm=False)
    await node.pod("vm", vm=True)
    whole = await node.raw(calls.STREAMS[name], b"")
    assert b"".join(await node.parts(name)) == whole
    assert not {asked for asked, _ in (*node.containers.asked, *node.vms.asked)} & {name}
    if name == "StreamContainers":
        await node.settled()
        await node.containers.stop()  # its last list is the answer
        told = [api_pb2.ListContainersResponse.FromString(one) for one in await node.parts(name)]
        assert container in {one.id for part in told for one in part.containers}
        assert len(told) == 2


async def test_filters_that_exclude_each_other_select_nothing(node: Node) -> None:
    box, _ = await node.pod("box", vm=False)
    _, container = await node.pod("vm", vm=True)
    assert await node.listed(id=container, pod_sandbox_id=box) == set()


async def test_file_systems_are_those_of_both_and_the_first_is_that_of_containers(
    node: Node,
) -> None:
    answer = await node.call("ImageFsInfo")
    mounts = [one.fs_id.mountpoint for one in answer.image_filesystems]
    assert mounts == ["/containerd", "/virtbus"]


async def test_the_version_is_that_of_the_runtime_of_containers(node: Node) -> None:
    assert (await node.call("Version")).runtime_name == "containerd"


async def test_the_status_has_the_handlers_of_both_runtimes(node: Node) -> None:
    answer = await node.call("Status", verbose=True)
    assert [one.name for one in answer.runtime_handlers] == ["", "containerd", "virtbus"]
    assert set(answer.info) == {"containerd", "virtbus"}
    told = {one.type: one.status for one in answer.status.conditions}
    assert told == {
        "RuntimeReady": True,
        "NetworkReady": True,
        "virtbus.io/Runtime-containers": True,
        "virtbus.io/Runtime-vms": True,
    }


async def test_a_runtime_of_vms_that_is_not_ready_has_a_condition_of_its_own(node: Node) -> None:
    node.vms.conditions = {"RuntimeReady": True, "NetworkReady": False}
    assert (await node.condition("NetworkReady")).status
    told = await node.condition("virtbus.io/Runtime-vms")
    assert (told.status, told.message) == (False, "not NetworkReady: Broken")


async def test_a_runtime_of_containers_that_is_not_ready_makes_the_node_not_ready(
    node: Node,
) -> None:
    node.containers.conditions = {"RuntimeReady": False, "NetworkReady": True}
    assert not (await node.condition("RuntimeReady")).status


async def test_the_node_configuration_reaches_both_runtimes(node: Node) -> None:
    config = {"network_config": {"pod_cidr": "10.1.0.0/24"}}
    await node.call("UpdateRuntimeConfig", runtime_config=config)
    assert node.containers.count("UpdateRuntimeConfig") == 1
    assert node.vms.count("UpdateRuntimeConfig") == 1
    await node.vms.stop()
    code, _ = await node.refused("UpdateRuntimeConfig", runtime_config=config)
    assert code == grpc.StatusCode.UNAVAILABLE
    assert node.containers.count("UpdateRuntimeConfig") == 2


@pytest.mark.parametrize(
    "name",
    [
        "Version",
        "ListContainers",
        "ContainerStatus",
        "ExecSync",
        "ImageStatus",
        "ListPodSandbox",
        "Status",
    ],
)
async def test_unknown_fields_of_an_answer_survive(node: Node, name: str) -> None:
    _, container = await node.pod("box", vm=False)
    node.containers.raw[name] = UNKNOWN_FIELD
    with_id = name in {"ContainerStatus", "ExecSync"}
    body = api_pb2.ContainerStatusRequest(container_id=container).SerializeToString()
    assert UNKNOWN_FIELD in await node.raw(name, body if with_id else b"")


async def test_unknown_fields_of_a_request_and_of_an_entry_survive(node: Node) -> None:
    box, _ = await node.pod("vm", vm=True)
    body = api_pb2.ExecSyncRequest(container_id="none").SerializeToString() + UNKNOWN_FIELD
    await node.raw("ExecSync", body)
    assert node.containers.asked[-1][1].SerializeToString() == body
    entry = api_pb2.PodSandbox(id=box).SerializeToString() + UNKNOWN_FIELD
    node.vms.answers["ListPodSandbox"] = lambda _: api_pb2.ListPodSandboxResponse.FromString(
        b"\x0a" + bytes([len(entry)]) + entry
    )
    await node.settled()
    await node.vms.stop()
    assert UNKNOWN_FIELD in await node.raw("ListPodSandbox", b"")


async def test_a_list_that_the_runtime_of_vms_lacks_is_that_of_containers(node: Node) -> None:
    missing = (grpc.StatusCode.UNIMPLEMENTED, "no such call")
    node.vms.errors["ListPodSandboxMetrics"] = missing
    assert not (await node.call("ListPodSandboxMetrics")).pod_metrics
    node.containers.errors["ListPodSandboxMetrics"] = missing
    assert await node.refused("ListPodSandboxMetrics") == missing


# --- events ------------------------------------------------------------------------------------
def event(key: str) -> api_pb2.ContainerEventResponse:
    return api_pb2.ContainerEventResponse(container_id=key)


async def test_events_of_both_runtimes_are_one_stream(node: Node) -> None:
    stream = node.events()
    node.vms.events.put_nowait(event("a"))
    node.containers.events.put_nowait(event("b"))
    told = {
        api_pb2.ContainerEventResponse.FromString(await stream.read()).container_id
        for _ in range(2)
    }
    assert told == {"a", "b"}
    stream.cancel()
    await until(lambda: node.vms.streams + node.containers.streams == 0, "both streams ended")


async def test_a_stream_ends_when_a_lost_runtime_is_back(node: Node) -> None:
    stream = node.events()
    node.vms.events.put_nowait(event("a"))
    await stream.read()
    await node.vms.stop()
    node.containers.events.put_nowait(event("b"))
    told = api_pb2.ContainerEventResponse.FromString(await stream.read())
    assert told.container_id == "b"  # containers' events continue
    await node.vms.start()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stream.read()
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    assert "list, then call again" in str(caught.value.details())


async def test_without_events_in_one_runtime_the_node_has_none(node: Node) -> None:
    node.containers.errors["GetContainerEvents"] = (grpc.StatusCode.UNIMPLEMENTED, "none")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await node.events().read()
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
    await until(lambda: node.vms.streams == 0, "the other stream ended")


async def test_clients_that_read_no_events_delay_nobody_and_have_a_limit(node: Node) -> None:
    streams = [node.events() for _ in range(16)]
    await until(lambda: node.vms.streams == 16, "the streams are open")
    large = api_pb2.ContainerEventResponse(container_id="x" * 100_000)
    for _ in range(64):
        node.vms.events.put_nowait(large)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await node.events().read()
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    async with asyncio.timeout(5):
        await node.listed()
    for stream in streams:
        stream.cancel()
    await until(lambda: node.vms.streams + node.containers.streams == 0, "the streams ended")


async def test_a_client_that_leaves_during_a_write_leaves_no_error(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    stream = node.events()
    await until(lambda: node.vms.streams + node.containers.streams == 2, "both streams are open")
    for _ in range(64):
        node.vms.events.put_nowait(api_pb2.ContainerEventResponse(container_id="x" * 100_000))
    await until(lambda: node.vms.events.qsize() < 60, "the client gets events, and reads none")
    await asyncio.sleep(0.1)
    stream.cancel()
    await until(lambda: node.vms.streams + node.containers.streams == 0, "both streams ended")
    await asyncio.sleep(0.1)
    gc.collect()
    assert [one for one in caplog.records if one.name == "asyncio"] == []


def test_a_list_in_another_order_is_the_same_list() -> None:
    labels = {"b": "1", "a": "2"}
    one = api_pb2.Container(id="1", state=api_pb2.CONTAINER_RUNNING, labels=labels)
    two = api_pb2.Container(id="2", labels=dict(reversed(labels.items())))

    def digest(*listed: api_pb2.Container) -> int:
        body = api_pb2.ListContainersResponse(containers=listed).SerializeToString()
        return messages.digest("ListContainers", body)

    assert digest(one, two) == digest(two, one)
    assert digest(one, two) != digest(one)
    ended = api_pb2.Container(id="1", state=api_pb2.CONTAINER_EXITED, labels=labels)
    assert digest(one, two) != digest(ended, two)


@pytest.mark.parametrize(
    ("call", "field", "name"),
    [
        ("ListPodSandbox", "items", "PodSandbox"),
        ("ListImages", "images", "Image"),
        ("ListMetricDescriptors", "descriptors", "MetricDescriptor"),
    ],
)
def test_each_list_that_is_kept_has_an_order_of_its_own(call: str, field: str, name: str) -> None:
    key = "name" if name == "MetricDescriptor" else "id"
    listed = [getattr(api_pb2, name)(**{key: text}) for text in ("b", "a", "c")]

    def digest(elements: list[Any]) -> int:
        answer = getattr(api_pb2, f"{call}Response")(**{field: elements})
        return messages.digest(call, answer.SerializeToString())

    assert digest(listed) == digest(sorted(listed, key=lambda one: getattr(one, key)))
    assert digest(listed) != digest(listed[1:])


async def test_statistics_are_kept_without_a_comparison(node: Node) -> None:
    """Each has a time of its own, so the last one is the one that is kept."""
    _, container_id = await node.pod("a", vm=True)
    for _ in range(2):
        await node.call("ListContainerStats")
        await node.proxy.memory.kept()
    await node.vms.stop()
    kept = (await node.call("ListContainerStats")).stats
    assert [one.attributes.id for one in kept] == [container_id]
