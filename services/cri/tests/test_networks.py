"""The networks of a pod: one NIC of its VM for each."""

from pathlib import Path

import pytest
from grpc import StatusCode
from services.cri.tests.world import Fleet, Kubelet, cri, sandbox

from virtbus.schemas.errors import Code, Detail, VirtbusError
from virtbus.schemas.network import InterfaceStatus
from virtbus.schemas.nic import NICS_MAX

MOST = f"{NICS_MAX} NICs"
GENIE, MULTUS = "cni", "k8s.v1.cni.cncf.io/networks"


@pytest.mark.parametrize(
    ("annotations", "networks"),
    [
        ({}, ["pods"]),
        ({GENIE: ""}, ["pods"]),
        ({GENIE: "calico"}, ["calico"]),
        ({GENIE: "calico, flannel"}, ["calico", "flannel"]),
        ({MULTUS: "blue,green"}, ["pods", "blue", "green"]),
        ({GENIE: "calico", MULTUS: "blue"}, ["calico", "blue"]),
    ],
)
async def test_each_network_of_a_pod_is_a_nic_and_the_first_has_its_ports(
    tmp_path: Path, fleet: Fleet, annotations: dict[str, str], networks: list[str]
) -> None:
    ports = [{"container_port": 80, "host_port": 8080}]
    async with cri(tmp_path, fleet, pod_network="pods") as kubelet:
        told = sandbox(annotations=annotations, port_mappings=ports)
        await kubelet.container(await kubelet.sandbox(**told))
    spec = fleet.vm.spec
    assert [one.network for one in spec.networks] == networks
    nics = spec.domain.devices.interfaces
    assert [one.name for one in nics] == [one.name for one in spec.networks]
    assert [len(one.publish) for one in nics] == [1] + [0] * (len(networks) - 1)


@pytest.mark.parametrize(
    ("key", "value", "word"),
    [
        (GENIE, "calico,,flannel", "''"),
        (GENIE, "Calico", "'Calico'"),
        (MULTUS, "default/blue", "'default/blue'"),
        (MULTUS, '[{"name": "blue"}]', "names of networks"),
        (GENIE, ",".join(f"n{at}" for at in range(NICS_MAX + 1)), MOST),
        (MULTUS, ",".join(f"n{at}" for at in range(NICS_MAX)), MOST),
    ],
)
async def test_an_annotation_that_does_not_name_networks_is_refused(
    kubelet: Kubelet, key: str, value: str, word: str
) -> None:
    wanted = sandbox(annotations={key: value})
    code, text = await kubelet.refused("RunPodSandbox", config=wanted)
    assert (code, word in text) == (StatusCode.INVALID_ARGUMENT, True), text
    assert key in text


async def test_a_network_that_nobody_has_is_refused_with_its_annotation(
    fleet: Fleet, kubelet: Kubelet
) -> None:
    path = "spec.networks[1].network"
    fleet.errors["vm.create"] = VirtbusError(
        Code.NOT_FOUND,
        "network_unknown",
        f"{path}: there is no network 'green'",
        details=(Detail(path=path, message="there is no network 'green'"),),
    )
    wanted = sandbox(annotations={GENIE: "blue,green"})
    code, text = await kubelet.refused("RunPodSandbox", config=wanted)
    assert code is StatusCode.NOT_FOUND
    assert "annotations.cni: there is no network 'green'" in text


async def test_only_the_first_nic_has_addresses_of_the_pod(fleet: Fleet, kubelet: Kubelet) -> None:
    sandbox_id = await kubelet.sandbox(annotations={GENIE: "blue,green"})
    container_id = await kubelet.container(sandbox_id)
    await kubelet.call("StartContainer", container_id=container_id)
    mac = "02:00:00:00:00:01"
    fleet.show(
        fleet.vm.uid,
        interfaces=(
            InterfaceStatus(name="net1", mac=mac, addresses=("192.0.2.9/24",)),
            InterfaceStatus(name="default", mac=mac, addresses=("10.1.0.7/16", "fd00::7/64")),
        ),
    )
    while True:
        answer = await kubelet.call("PodSandboxStatus", pod_sandbox_id=sandbox_id)
        if (network := answer.status.network).ip == "10.1.0.7":
            break
    assert [one.ip for one in network.additional_ips] == ["fd00::7"]
