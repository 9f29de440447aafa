"""The proxy before the real `virtbus-cri`, whose fleet is a fake."""

from pathlib import Path

from cri_api.v1 import api_pb2
from services.cri.tests.world import Fleet, container, cri
from services.criproxy.tests.world import TARGET, Node, sandbox

OWN = "virtbus.io/Runtime-vms"


async def test_a_vm_pod_lives_behind_the_proxy_and_its_runtime_may_die(tmp_path: Path) -> None:
    proxied = Node(tmp_path, vm_runtime=tmp_path / "run" / "cri.sock")
    async with Fleet().serving() as fleet, proxied.running() as node:
        async with cri(tmp_path, fleet):
            await node.back(OWN)
            spec = {"image": "virtlet.cloud/tiny"}
            image = (await node.call("PullImage", image=spec)).image_ref
            config = sandbox("web", annotations=TARGET)
            box = (await node.call("RunPodSandbox", config=config)).pod_sandbox_id
            wanted = container(image={"image": image, "user_specified_image": spec["image"]})
            made = await node.call("CreateContainer", pod_sandbox_id=box, config=wanted)
            await node.call("StartContainer", container_id=made.container_id)
            other, _ = await node.pod("box", vm=False)
            assert await node.sandboxes() == {box, other}
            assert (await node.condition("virtbus.io/BusConnected")).status
            assert await _state(node, made.container_id) == api_pb2.CONTAINER_RUNNING
            await node.settled()
        assert await node.sandboxes() == {box, other}  # virtbus-cri has ended
        assert await _state(node, made.container_id) == api_pb2.CONTAINER_RUNNING
        assert not (await node.condition(OWN)).status
        async with cri(tmp_path, fleet):
            await node.back(OWN)
            await node.call("StopPodSandbox", pod_sandbox_id=box)
            await node.call("RemovePodSandbox", pod_sandbox_id=box)
            assert await node.sandboxes() == {other}


async def _state(node: Node, key: str) -> int:
    answer = await node.call("ContainerStatus", container_id=key)
    return int(answer.status.state)
