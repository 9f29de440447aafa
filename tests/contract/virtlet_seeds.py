"""Virtlet's cases of cloud-init data: pods, and the seeds that their guests get.

`python -m tests.contract.virtlet_seeds` writes the golden file again; review its difference.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from virtbus.cri.core import vm_request
from virtbus.cri.core.configs import (
    ContainerConfig,
    ContainerMetadata,
    Device,
    KeyValue,
    Mount,
    SandboxConfig,
    SandboxMetadata,
)
from virtbus.cri.core.image_record import PulledImage
from virtbus.cri.core.pod import Pod, ShellKey
from virtbus.nodeagent.core.config_drive import config_drive_files
from virtbus.nodeagent.core.seed import seed_files
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.network import InterfaceStatus
from virtbus.schemas.vm import VmRecord

GOLDEN = Path(__file__).parent / "golden" / "virtlet-seeds.json"
UID = "0192f0c1-2d3e-7abc-8def-0123456789ab"
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGZvbw== of-the-pod"
THEIRS = "ssh-rsa AAAAB3NzaC1yc2EAAAA= somebody@example"
NIC = InterfaceStatus(name="default", mac="02:00:00:00:00:01")
SECOND = InterfaceStatus(name="second", mac="02:00:00:00:00:02")
FOLDER = "/var/lib/kubelet/pods/0c5f/volumes"
IMAGE = PulledImage(
    name="tiny",
    digest="sha256:" + "a" * 64,
    ref="tiny@sha256:" + "a" * 64,
    size_bytes=1,
    virtual_bytes=1,
    pulled_ns=1,
)
PLACE = vm_request.Place("worker-1", "default")


class Case(NamedTuple):
    """A pod of Virtlet: its annotations, and its container."""

    annotations: Mapping[str, str] = {}
    config: ContainerConfig = ContainerConfig()
    nics: tuple[InterfaceStatus, ...] = (NIC,)


def flexvolume(part: str) -> ContainerConfig:
    """Return a container with a raw flexvolume, as the driver and the node's paths describe it."""
    mount = Mount(
        container_path="/data",
        host_path=f"{FOLDER}/virtlet~flexvolume_driver/data",
        options={"type": "raw", "path": "/dev/loop0", "part": part},
        block_path="/dev/loop0",
        permitted=True,
    )
    return ContainerConfig(mounts=(mount,))


def block(path: str) -> ContainerConfig:
    """Return a container with a block volume."""
    device = Device(
        container_path=path, host_path="/dev/loop1", permissions="mrw", block_path="/dev/loop1"
    )
    return ContainerConfig(devices=(device,))


ENVIRONMENT = (KeyValue(key="FOO", value="bar"), KeyValue(key="FOO_BAR", value="a b"))
DRIVE = {"VirtletCloudInitImageType": "configdrive"}
SCRIPT = "#!/bin/sh\necho hello >/dev/console\n"
WRITE_FILES = "write_files: [{path: /etc/foo, content: whatever}]\n"
CASES: Mapping[str, Case] = {
    "plain pod": Case(),
    "meta-data of a config drive": Case(DRIVE),
    "ssh keys": Case({"VirtletSSHKeys": f"{THEIRS}\n\n"}),
    "meta-data override": Case(
        {
            "VirtletCloudInitMetaData": f'{{"instance-id": "x", "local-hostname": "other", '
            f'"public-keys": ["{THEIRS}"]}}'
        }
    ),
    "meta-data with other keys": Case(
        {"VirtletCloudInitMetaData": '{"colour": "blue", "local-hostname": "other.shop"}'}
    ),
    "user data": Case({"VirtletCloudInitUserData": "users: [{name: cloudy}]\nssh_pwauth: true\n"}),
    "environment": Case(config=ContainerConfig(envs=ENVIRONMENT)),
    "environment and the user's write_files": Case(
        {"VirtletCloudInitUserData": WRITE_FILES}, ContainerConfig(envs=ENVIRONMENT)
    ),
    "script": Case({"VirtletCloudInitUserDataScript": SCRIPT}),
    "script with an environment": Case(
        {"VirtletCloudInitUserDataScript": SCRIPT}, ContainerConfig(envs=ENVIRONMENT)
    ),
    "flexvolume": Case(config=flexvolume("")),
    "flexvolume, whole disk": Case(config=flexvolume("0")),
    "flexvolume, second partition": Case(config=flexvolume("2")),
    "folder of the node (9p in Virtlet)": Case(
        config=ContainerConfig(
            mounts=(Mount(container_path="/opt", host_path="/srv/opt", is_folder=True),)
        )
    ),
    "block device": Case(config=block("/dev/testpvc")),
    "block device with the user's mounts": Case(
        {"VirtletCloudInitUserData": "mounts: [[/dev/testpvc, /mnt]]\n"}, block("/dev/testpvc")
    ),
    "persistent root": Case(config=block("/")),
    "forced DHCP": Case({"VirtletForceDHCPNetworkConfig": "true"}),
    "script with the token of mounts": Case(
        {"VirtletCloudInitUserDataScript": "#!/bin/sh\n@virtlet-mount-script@\necho mounted\n"},
        flexvolume("0"),
    ),
    "two NICs": Case(nics=(NIC, SECOND)),
    "one NIC, config drive": Case(DRIVE, nics=(NIC,)),
    "two NICs, config drive": Case(DRIVE, nics=(NIC, SECOND)),
}


def seed_of(case: Case) -> dict[str, str]:
    """Return the files of the guest's seed by name, or the reason of the pod's refusal."""
    sandbox = SandboxConfig(
        metadata=SandboxMetadata(name="web", uid="0c5f", namespace="default"),
        hostname="web",
        annotations={"kubernetes.io/target-runtime": "virtlet.cloud", **case.annotations},
    )
    config = case.config.model_copy(update={"metadata": ContainerMetadata(name="vm")})
    machine = vm_request.new_machine(sandbox, UID, ShellKey(private="", public=KEY))
    try:
        vm_request.check_sandbox(sandbox)
        pod = Pod(key="0c5f").model_copy(update={"machine": machine})
        wanted = vm_request.create_request(pod, sandbox, config, IMAGE, PLACE)
    except VirtbusError as error:
        return {"refused": str(error)}
    assert wanted.spec is not None
    record = VmRecord(
        uid=UID,
        namespace="default",
        name=machine.name,
        spec=wanted.spec,
        spec_hash="0" * 64,
        node="n1",
        created_ns=1,
    )
    seed = next(one for one in wanted.spec.volumes if one.cloud_init is not None)
    if seed.cloud_init_config_drive is not None:
        made = config_drive_files(record, seed.cloud_init_config_drive, case.nics)
    else:
        assert seed.cloud_init is not None
        made = seed_files(record, seed.cloud_init, case.nics)
    return {name: data.decode() for name, data in sorted(made.items())}


def golden() -> Any:
    """Return the stored seeds by case."""
    return json.loads(GOLDEN.read_text(encoding="utf-8"))


def main() -> None:
    """Write the golden file again."""
    found = {name: seed_of(case) for name, case in CASES.items()}
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
