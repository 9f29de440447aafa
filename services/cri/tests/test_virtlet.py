"""Virtlet's annotations: its defaults, its rules, and a VM that has what they describe."""

from typing import Any

import pytest
from grpc import StatusCode
from services.cri.tests.world import Fleet, Kubelet, sandbox

from virtbus.cri.core import virtlet
from virtbus.cri.core.virtlet import Wishes, wishes
from virtbus.schemas.disk import DiskBus
from virtbus.schemas.vm import CpuFeature

GIB = 1024**3
UUID = "53008994-44c0-4017-ad44-9c49758083da"
META = '{"colour": ["blue"], "7": 1}'
KEY = "ssh-rsa AAAAB3NzaC1yc2E first@example"
OTHER_KEY = "ssh-rsa AAAAB3NzaC1yc2E second@example"
VIRTLETS = {"kubernetes.io/target-runtime": "virtlet.cloud"}
DEFAULTS = Wishes(vcpus=1, disk_bus=DiskBus.SCSI)


def test_a_pod_of_virtlet_has_virtlets_defaults_and_another_pod_has_ours() -> None:
    assert wishes(VIRTLETS) == (DEFAULTS, [])
    assert wishes({"team": "a"}) == (Wishes(), [])


def test_every_annotation_is_known() -> None:
    assert len(virtlet.KEYS - {virtlet.TARGET}) == 19


@pytest.mark.parametrize(
    ("key", "text", "field", "value"),
    [
        ("VirtletVCPUCount", "-1", "vcpus", 1),
        ("VirtletVCPUCount", "0", "vcpus", 1),
        ("VirtletVCPUCount", "4", "vcpus", 4),
        ("VirtletDiskDriver", "virtio", "disk_bus", DiskBus.VIRTIO),
        ("VirtletDiskDriver", "scsi", "disk_bus", DiskBus.SCSI),
        ("VirtletRootVolumeSize", "1Gi", "root_bytes", GIB),
        ("VirtletRootVolumeSize", "-1", "root_bytes", 0),
        ("VirtletRootVolumeSize", "0", "root_bytes", 0),
        ("VirtletCloudInitImageType", "ConfigDrive", "config_drive", True),
        ("VirtletCloudInitImageType", "nocloud", "config_drive", False),
        ("VirtletSSHKeys", f"{KEY}\n\n  {OTHER_KEY}  \n", "ssh_keys", (KEY, OTHER_KEY)),
        ("VirtletSystemUUID", UUID.upper(), "system_uuid", UUID),
        ("VirtletCPUModel", "host-model", "cpu_model", None),
        ("VirtletLibvirtCPUSetting", "mode: host-passthrough", "cpu_model", None),
        ("VirtletLibvirtCPUSetting", "Model: {Value: Nehalem}", "cpu_model", "Nehalem"),
        (
            "VirtletLibvirtCPUSetting",
            "{mode: custom, model: {value: Westmere}, features: [{name: avx, policy: disable}]}",
            "cpu_features",
            (CpuFeature(name="avx", policy="disable"),),
        ),
        ("VirtletCloudInitMetaData", "local-hostname: db", "hostname", "db"),
        ("VirtletCloudInitMetaData", f"public-keys: ['{KEY}']", "ssh_keys", (KEY,)),
        ("VirtletCloudInitMetaData", "instance-id: foobar", "hostname", ""),
        ("VirtletCloudInitMetaData", "local-hostname: db.shop", "hostname", "db.shop"),
        ("VirtletCloudInitMetaData", "{colour: [blue], 7: 1}", "meta_data", META),
        ("VirtletCloudInitMetaData", "{instance-id: x, hostname: db}", "meta_data", None),
        ("VirtletCloudInitUserData", "a: [1]", "user_data", '#cloud-config\n{"a": [1]}\n'),
        (
            "VirtletCloudInitUserData",
            "a: {2020-01-01: !!binary YQ==, 7: 2020-01-02}",
            "user_data",
            '#cloud-config\n{"a": {"2020-01-01": "a", "7": "2020-01-02"}}\n',
        ),
        ("VirtletCloudInitUserDataScript", "#!/bin/sh\nid", "user_data", "#!/bin/sh\nid"),
        ("VirtletCloudInitUserDataScript", "#!/x\n@virtlet-mount-script@", "user_data", "#!/x\n"),
        ("VirtletCloudInitUserDataOverwrite", "true", "user_data", None),
        ("VirtletChown9pfsMounts", "true", "user_data", None),
        ("VirtletForceDHCPNetworkConfig", "true", "user_data", None),
    ],
)
def test_an_annotation_has_virtlets_meaning(key: str, text: str, field: str, value: Any) -> None:
    found, problems = wishes({key: text})
    assert problems == []
    assert getattr(found, field) == value


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("VirtletVCPUCount", "256"),
        ("VirtletVCPUCount", "two"),
        ("VirtletVCPUCount", "9" * 5000),
        ("VirtletDiskDriver", "ducttape"),
        ("VirtletDiskDriver", "SCSI"),
        ("VirtletRootVolumeSize", "much"),
        ("VirtletCloudInitImageType", "ducttape"),
        ("VirtletCloudInitUserData", "{"),
        ("VirtletCloudInitUserData", "[1]"),
        ("VirtletCloudInitUserData", "x" * 40_000),
        ("VirtletCloudInitMetaData", "{"),
        ("VirtletCloudInitMetaData", "local-hostname: a b"),
        ("VirtletCloudInitMetaData", "colour: !!binary /w=="),
        ("VirtletCloudInitMetaData", "public-keys: 1"),
        ("VirtletSystemUUID", "mine"),
        ("VirtletCPUModel", "Nehalem"),
        ("VirtletLibvirtCPUSetting", "features: [{name: vmx, policy: disable}]"),
        ("VirtletLibvirtCPUSetting", "mode: maximum"),
        ("VirtletLibvirtCPUSetting", "mode: [custom]"),
        ("VirtletLibvirtCPUSetting", "{model: Nehalem, features: [{name: vmx, policy: maybe}]}"),
        ("VirtletLibvirtCPUSetting", "{model: Nehalem, features: 7}"),
        ("VirtletLibvirtCPUSetting", "cache: {level: 3}"),
        ("VirtletLibvirtCPUSetting", "topology: {sockets: 2, cores: 1, threads: 1}"),
        ("VirtletLibvirtCPUSetting", "topology: {sockets: 0}"),
        ("VirtletLibvirtCPUSetting", "topology: {sockets: many}"),
        ("VirtletLibvirtCPUSetting", "topology: {dies: 2}"),
        ("VirtletLibvirtCPUSetting", "topology: {model: 2}"),
        ("VirtletLibvirtCPUSetting", "topology: [2]"),
        ("VirtletCloudInitUserDataSource", "configmap/data/key"),
        ("VirtletCloudInitUserDataSource", "pod/data"),
        ("VirtletCloudInitUserDataSourceKey", "key"),
        ("VirtletCloudInitUserDataSourceEncoding", "rot13"),
        ("VirtletSSHKeySource", "secret"),
        ("VirtletSSHKeySource", "secret/keys/../x"),
        ("VirtletFilesFromDataSource", "secret/../configmaps"),
    ],
)
def test_a_wrong_annotation_is_refused_by_name(key: str, text: str) -> None:
    (problem,) = wishes({key: text})[1]
    assert problem.path == f"annotations.{key}"
    assert problem.message.startswith(f"{key} ")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("topology: {sockets: 0}", "sockets: "),
        ("{model: Nehalem, features: [{name: vmx, policy: maybe}]}", "policy: "),
        ("topology: {dies: 2}", "sockets, cores, threads"),
        ("topology: {sockets: 2}", "2 vCPUs, and VirtletVCPUCount means 1"),
    ],
)
def test_a_cpu_that_no_vm_can_have_is_refused_with_the_reason(text: str, words: str) -> None:
    (problem,) = wishes({"VirtletLibvirtCPUSetting": text})[1]
    assert words in problem.message


async def test_all_problems_are_reported_before_anything_is_made(
    fleet: Fleet, kubelet: Kubelet
) -> None:
    notes = {"VirtletVCPUCount": "256", "VirtletDiskDriver": "ducttape"}
    code, text = await kubelet.refused("RunPodSandbox", config=sandbox(annotations=notes))
    assert code is StatusCode.INVALID_ARGUMENT
    assert "VirtletVCPUCount" in text
    assert "and 1 more" in text
    assert not (await kubelet.call("ListPodSandbox")).items


async def test_the_vm_has_what_the_annotations_describe(fleet: Fleet, kubelet: Kubelet) -> None:
    notes = VIRTLETS | {
        "VirtletVCPUCount": "2",
        "VirtletRootVolumeSize": "4Gi",
        "VirtletSSHKeys": KEY,
        "VirtletSystemUUID": UUID,
        "VirtletCloudInitImageType": "configdrive",
        "VirtletCloudInitUserData": "users: [{name: me}]",
        "VirtletLibvirtCPUSetting": "Topology: {Sockets: 2, Cores: 1, Threads: 1}",
    }
    sandbox_id = await kubelet.sandbox(annotations=notes)
    envs = [{"key": "MODE", "value": "test"}]
    await kubelet.container(sandbox_id, envs=envs)
    spec = fleet.vm.spec
    root, seed = spec.volumes
    assert (spec.domain.cpu.sockets, spec.domain.cpu.cores) == (2, 1)
    assert spec.domain.firmware.uuid == UUID
    assert [disk.bus for disk in spec.domain.devices.disks] == [DiskBus.SCSI, DiskBus.SCSI]
    assert root.image is not None
    assert root.image.size == 4 * GIB
    drive = seed.cloud_init_config_drive
    assert drive is not None
    assert (drive.hostname, drive.ssh_keys[0]) == ("web", KEY)
    assert drive.user_data == '#cloud-config\n{"users": [{"name": "me"}]}\n'
    assert drive.environment == {"MODE": "test"}


async def test_a_root_disk_is_never_smaller_than_its_image(fleet: Fleet, kubelet: Kubelet) -> None:
    sandbox_id = await kubelet.sandbox(annotations={"VirtletRootVolumeSize": "1000"})
    await kubelet.container(sandbox_id)
    root = fleet.vm.spec.volumes[0].image
    assert root is not None
    assert root.size is None
