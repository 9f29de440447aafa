"""Each call reaches the runtime that its pod or image belongs to."""

from typing import Any

import grpc
import pytest
from services.criproxy.tests.world import TARGET, Node, sandbox

REFUSED = grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("handler", "annotations", "vm"),
    [
        ("", {}, False),
        ("runc", {}, False),
        ("virtbus", {}, True),
        ("", TARGET, True),
        ("virtbus", TARGET, True),
    ],
)
async def test_a_pod_runs_in_the_runtime_of_its_class_or_annotation(
    node: Node, handler: str, annotations: dict[str, str], vm: bool
) -> None:
    config = sandbox("web", annotations=annotations)
    await node.call("RunPodSandbox", config=config, runtime_handler=handler)
    assert (len(node.vms.sandboxes), len(node.containers.sandboxes)) == (int(vm), int(not vm))


@pytest.mark.parametrize(
    ("handler", "annotations", "words"),
    [
        ("runc", TARGET, "remove one of them"),
        (
            "",
            {"kubernetes.io/target-runtime": "docker"},
            "no runtime of this node is named 'docker'",
        ),
    ],
)
async def test_a_contradiction_is_refused_with_its_next_step(
    node: Node, handler: str, annotations: dict[str, str], words: str
) -> None:
    config = sandbox("web", annotations=annotations)
    code, text = await node.refused("RunPodSandbox", config=config, runtime_handler=handler)
    assert code == REFUSED
    assert words in text
    assert not node.containers.sandboxes
    assert not node.vms.sandboxes


async def test_calls_with_an_id_reach_its_runtime(node: Node) -> None:
    for vm, runtime, other in (
        (True, node.vms, node.containers),
        (False, node.containers, node.vms),
    ):
        _, container = await node.pod(f"web-{vm}", vm=vm)
        for name in (
            "ExecSync",
            "Exec",
            "Attach",
            "ReopenContainerLog",
            "ContainerStats",
            "UpdateContainerResources",
            "CheckpointContainer",
            "StopContainer",
        ):
            before = other.count(name)
            await node.call(name, container_id=container)
            assert runtime.count(name) == 1
            assert other.count(name) == before


async def test_the_url_of_a_stream_is_that_of_the_runtime(node: Node) -> None:
    _, container = await node.pod("web", vm=True)
    answer = await node.call("Attach", container_id=container)
    assert answer.url == "http://127.0.0.1:1/virtbus"


async def test_an_id_that_the_proxy_has_never_seen_is_found(node: Node) -> None:
    _, container = await node.pod("web", vm=True)
    await node.restart()
    for state in (node.folder / "state" / "criproxy").rglob("*"):
        if state.is_file():
            state.unlink()
    await node.restart()
    await node.call("StopContainer", container_id=container)
    assert node.vms.count("StopContainer") == 1
    await node.call("ContainerStatus", container_id=container)


async def test_stops_and_removals_may_be_repeated_and_come_out_of_order(node: Node) -> None:
    box, container = await node.pod("web", vm=True)
    for _ in range(2):
        await node.call("RemovePodSandbox", pod_sandbox_id=box)
        await node.call("RemoveContainer", container_id=container)
        await node.call("StopContainer", container_id=container)
        await node.call("StopPodSandbox", pod_sandbox_id=box)
    assert node.vms.count("RemovePodSandbox") == 2
    assert node.containers.count("RemovePodSandbox") == 0
    assert not await node.listed()
    await node.call("RemovePodSandbox", pod_sandbox_id="never-made")


async def test_a_pod_that_is_run_twice_is_one_sandbox(node: Node) -> None:
    first, _ = await node.pod("web", vm=True, container=False)
    again, _ = await node.pod("web", vm=True, container=False)
    assert first == again
    assert await node.sandboxes() == {first}


@pytest.mark.parametrize(
    ("spec", "vm"),
    [
        ({"image": "virtlet.cloud/tiny:latest"}, True),
        ({"image": "busybox"}, False),
        ({"image": "tiny", "runtime_handler": "virtbus"}, True),
        ({"image": "tiny", "annotations": TARGET}, True),
    ],
)
async def test_an_image_is_pulled_by_its_prefix_handler_or_annotation(
    node: Node, spec: dict[str, str], vm: bool
) -> None:
    await node.call("PullImage", image=spec)
    assert bool(node.vms.images) == vm
    assert bool(node.containers.images) == (not vm)


async def test_an_image_is_pulled_where_its_pod_runs(node: Node) -> None:
    await node.pod("web", vm=True, container=False)
    await node.call("PullImage", image={"image": "tiny"}, sandbox_config=sandbox("web"))
    assert len(node.vms.images) == 1
    await node.pod("box", vm=False, container=False)
    await node.call("PullImage", image={"image": "tiny"}, sandbox_config=sandbox("box"))
    assert len(node.containers.images) == 1


async def test_a_vm_image_in_a_pod_of_containers_is_refused_early(node: Node) -> None:
    box, _ = await node.pod("web", vm=False, container=False)
    image = {"image": "virtlet.cloud/tiny"}
    pulled = await node.refused("PullImage", image=image, sandbox_config=sandbox("web"))
    made = await node.refused(
        "CreateContainer",
        pod_sandbox_id=box,
        config={"image": {"image": "sha256:1", "user_specified_image": "virtlet.cloud/tiny"}},
    )
    for code, text in (pulled, made):
        assert code == REFUSED
        assert "give the pod the RuntimeClass of virtbus" in text
    assert node.containers.count("CreateContainer") == 0


async def test_the_status_of_an_image_comes_from_the_runtime_that_has_it(node: Node) -> None:
    await node.call("PullImage", image={"image": "tiny", "runtime_handler": "virtbus"})
    await node.call("PullImage", image={"image": "busybox"})
    for image, runtime in (("tiny", "virtbus"), ("busybox", "containerd")):
        answer = await node.call("ImageStatus", image={"image": image})
        assert answer.image.id == f"sha256:{runtime}-{image}"
    assert not (await node.call("ImageStatus", image={"image": "none"})).HasField("image")


async def test_an_image_is_removed_only_where_it_is(node: Node) -> None:
    await node.call("PullImage", image={"image": "virtlet.cloud/tiny"})
    await node.call("PullImage", image={"image": "busybox"})
    await node.settled()
    await node.call("RemoveImage", image={"image": "sha256:virtbus-virtlet.cloud/tiny"})
    assert node.containers.count("RemoveImage") == 0
    assert not node.vms.images
    assert node.containers.images


async def test_a_removal_is_no_success_if_no_runtime_could_be_asked(node: Node) -> None:
    await node.settled()
    await node.vms.stop()
    await node.containers.stop()
    await node.sandboxes()  # the proxy sees that both are away
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await node.call("RemoveImage", image={"image": "sha256:unknown"})
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE


async def test_a_call_that_the_proxy_does_not_know_is_unimplemented(node: Node) -> None:
    method: Any = node.channel.unary_unary("/runtime.v1.RuntimeService/NobodyKnowsThis")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await method(b"")
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
