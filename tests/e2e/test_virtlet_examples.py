"""Virtlet's example manifests reach a login: each as a pod whose guest is `tiny`.

`tiny` reads no seed from a disk on scsi. So the examples that name no bus get virtio here.
"""

import json
from contextlib import ExitStack
from typing import Any

import pytest
from services.cri.tests.test_virtlet_examples import REACHED
from services.cri.tests.virtlet_examples import DEVICE, QCOW2, ROOT, VIRTIO, annotations
from tests.e2e.login import Login
from tests.e2e.platform import Platform, until
from tests.e2e.test_vm_pod import Runtime, block_device

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(900)]
MEMORY_BYTES = 128 * 1024**2
"""The memory of a guest without a limit; Virtlet's default is too much for a test host."""


def parts(runtime: Runtime, held: ExitStack, volume: str) -> dict[str, Any]:
    """Return the mounts and devices of a pod, as kubelet makes them."""
    if volume in {ROOT, DEVICE}:
        device = held.enter_context(block_device(runtime.platform.base, 512 * 1024**2))
        path = "/" if volume == ROOT else "/dev/testpvc"
        return {"devices": [{"host_path": device, "container_path": path, "permissions": "mrw"}]}
    if volume == QCOW2:
        folder = runtime.platform.base / "pods/0c5f/volumes/virtlet~flexvolume_driver/data"
        folder.mkdir(parents=True, exist_ok=True)
        options = {"type": "qcow2", "capacity": "2048MB"}
        (folder / "virtlet-flexvolume.json").write_text(json.dumps(options))
        return {"mounts": [{"host_path": str(folder), "container_path": "/var/lib/docker"}]}
    return {}


def test_the_examples_reach_a_login(patient: Platform) -> None:
    platform, runtime = patient, Runtime(patient)
    login = Login(platform.base)
    key = (platform.base / "key.pub").read_text().strip()
    with runtime.running(killed=False):
        image = runtime.call("PullImage", image={"image": "virtlet.cloud/tiny:latest"}).image_ref
        for number, (name, example) in enumerate(REACHED.items()):
            with ExitStack() as held:
                runtime.volumes = parts(runtime, held, example.volume)
                limits = {"memory_limit_in_bytes": example.memory_mib * 1024**2 or MEMORY_BYTES}
                runtime.volumes["linux"] = {"resources": limits}
                identity = {"name": name, "uid": f"e{number}", "namespace": "default"}
                config = {
                    "metadata": identity,
                    "hostname": name,
                    "log_directory": str(runtime.pods / name),
                    "annotations": {**VIRTIO, **annotations(example, key)},
                }
                sandbox_id = runtime.call("RunPodSandbox", config=config).pod_sandbox_id
                container_id = runtime.start(sandbox_id, image, 0)
                (vm,) = platform.vms()
                platform.uids.add(vm["uid"])
                platform.wait_ready(vm["name"])
                named = any("KEY" in text for text in example.annotations.values())
                if named and "users" not in json.dumps(example.annotations):
                    assert login(platform.get(vm["name"]), "echo in") == "in\n", name
                else:  # by the pod's own key, as kubectl exec
                    command = ["echo", "in"]
                    done = runtime.call("ExecSync", container_id=container_id, cmd=command)
                    assert done.stdout == b"in\n", name
                runtime.call("StopPodSandbox", pod_sandbox_id=sandbox_id)
                runtime.call("RemovePodSandbox", pod_sandbox_id=sandbox_id)
                until(lambda: not platform.vms(), "the VM is gone with its pod")
