"""Each failure that kubelet shows as an event of the pod names its stage and its reason."""

from typing import Any

import pytest
from grpc import StatusCode
from services.cri.tests.world import Fleet, Kubelet, container, sandbox

from virtbus.cri.core import stages
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.states import VmState

FOLDER = {"host_path": "/var/run/x.sock", "container_path": "/x"}


async def test_a_sandbox_that_cannot_be_a_vm_names_the_part(kubelet: Kubelet) -> None:
    port = {"host_port": 80, "container_port": 80, "protocol": "SCTP"}
    for change, start in (
        ({"port_mappings": [port]}, "network (pod_refused): "),
        ({"annotations": {"VirtletVCPUCount": "many"}}, "pod (pod_refused): "),
    ):
        _, text = await kubelet.refused("RunPodSandbox", config=sandbox(**change))
        assert text.startswith(start), text


async def test_a_host_port_of_tcp_or_udp_is_published_for_the_guest(
    fleet: Fleet, kubelet: Kubelet
) -> None:
    ports = [
        {"host_port": 8080, "container_port": 80},
        {"host_port": 53, "container_port": 53, "protocol": "UDP", "host_ip": "192.0.2.7"},
        {"container_port": 9, "host_ip": "0.0.0.0"},
    ]
    await kubelet.container(await kubelet.sandbox(port_mappings=ports))
    (nic,) = fleet.vm.spec.domain.devices.interfaces
    assert [
        (one.host_port, one.guest_port, one.protocol, one.host_address) for one in nic.publish
    ] == [(8080, 80, "tcp", None), (53, 53, "udp", "192.0.2.7")]


async def test_a_pull_names_the_image(fleet: Fleet, kubelet: Kubelet) -> None:
    _, text = await kubelet.refused("PullImage", image={"image": "nothing"})
    assert text.startswith("image (image_unknown): "), text
    _, text = await kubelet.refused("PullImage", image={"image": f"tiny@sha256:{'0' * 64}"})
    assert text.startswith("image (digest_mismatch): "), text


@pytest.mark.parametrize(
    ("given", "start"),
    [
        ({"image": {"image": "nobody"}}, "image (image_not_pulled): "),
        ({"devices": [{"host_path": "/none", "container_path": "/dev/x"}]}, "volume (pod_refused"),
    ],
)
async def test_a_container_that_cannot_be_made_names_the_part(
    kubelet: Kubelet, given: dict[str, Any], start: str
) -> None:
    sandbox_id = await kubelet.sandbox()
    image = await kubelet.call("PullImage", image={"image": "tiny"})
    config = container(image={"image": image.image_ref}) | given
    _, text = await kubelet.refused("CreateContainer", pod_sandbox_id=sandbox_id, config=config)
    assert text.startswith(start), text


async def test_a_refusal_of_the_controllers_names_its_part(fleet: Fleet, kubelet: Kubelet) -> None:
    sandbox_id = await kubelet.sandbox()
    fleet.errors["vm.create"] = VirtbusError(Code.NOT_FOUND, "network_unknown", "no network lan")
    image = await kubelet.call("PullImage", image={"image": "tiny"})
    config = container(image={"image": image.image_ref})
    code, text = await kubelet.refused("CreateContainer", pod_sandbox_id=sandbox_id, config=config)
    assert (code, text) == (StatusCode.NOT_FOUND, "network (network_unknown): no network lan")


@pytest.mark.parametrize(
    ("stage", "reason", "start"),
    [
        ("network", "cni_failed", "network (cni_failed): the VM did not start: it is broken"),
        ("image", "image_denied", "image (image_denied): "),
        ("image", "device_taken", "volume (device_taken): "),
        ("start", "directory_closed", "volume (directory_closed): "),
        ("start", "domain_refused", "start (domain_refused): "),
        ("guest", "guest_ended", "guest (guest_ended): "),
    ],
)
async def test_a_start_that_fails_names_the_stage_of_the_node_also_in_the_status(
    fleet: Fleet, kubelet: Kubelet, stage: str, reason: str, start: str
) -> None:
    container_id = await kubelet.container(await kubelet.sandbox())
    failed = {"failure_stage": stage, "reason": reason, "message": "it is broken"}
    fleet.at_start = {"state": VmState.FAILED, "power_observed": True, **failed}
    _, text = await kubelet.refused("StartContainer", container_id=container_id)
    assert text.startswith(start), text
    status = await kubelet.status(container_id)
    assert (status.reason, status.message) == ("StartError", text)


async def test_a_start_that_takes_too_long_names_what_it_waits_for(
    fleet: Fleet, kubelet: Kubelet
) -> None:
    container_id = await kubelet.container(await kubelet.sandbox())
    waits = {"failure_stage": "network", "reason": "cni_not_ready", "message": "no plugin yet"}
    fleet.at_start = {"state": VmState.PREPARING, **waits}
    _, text = await kubelet.refused("StartContainer", container_id=container_id, timeout_s=2)
    assert text.startswith("network (cni_not_ready): the VM does not run after"), text


def test_an_error_that_names_its_stage_keeps_it() -> None:
    inner = VirtbusError(Code.INTERNAL, "start_failed", "network (cni_failed): it is broken")
    assert str(stages.staged(inner, "start")) == "network (cni_failed): it is broken"
