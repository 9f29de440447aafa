"""Folders of the node in pods: the guest mounts them by virtiofs at their paths."""

import socket
from pathlib import Path
from typing import Any

import pytest
from grpc import StatusCode
from services.cri.tests.test_volumes import mount, volume
from services.cri.tests.world import Fleet, Kubelet

from virtbus.schemas.vm import Devices

Plain = dict[str, Any]


def folder(root: Path, *parts: str) -> Path:
    path = root.joinpath(*parts)
    path.mkdir(parents=True)
    return path


async def devices_of(fleet: Fleet, kubelet: Kubelet, *mounts: Plain) -> tuple[Devices, list[Any]]:
    """Return the devices of the VM of a pod with these mounts, and the mounts of its seed."""
    await kubelet.container(await kubelet.sandbox(), mounts=mounts)
    seed = fleet.vm.spec.volumes[1].cloud_init_no_cloud
    assert seed is not None
    return fleet.vm.spec.domain.devices, [
        (one.volume, one.path, one.options) for one in seed.mounts
    ]


@pytest.mark.parametrize(
    "parts",
    [
        ("srv", "data"),
        ("pods", "0c5f", "volumes", "kubernetes.io~csi", "pvc-1", "mount"),
        ("pods", "0c5f", "volumes", "kubernetes.io~local-volume", "pv-1"),
        ("pods", "0c5f", "volumes", "kubernetes.io~nfs", "nfs-1"),
        ("pods", "0c5f", "volume-subpaths", "pv-1", "vm", "0"),
    ],
)
async def test_a_folder_of_the_node_is_mounted_at_its_path(
    tmp_path: Path, fleet: Fleet, kubelet: Kubelet, parts: tuple[str, ...]
) -> None:
    path = folder(tmp_path, *parts)
    devices, mounts = await devices_of(fleet, kubelet, mount(path, "/var/lib/app"))
    (one,) = devices.filesystems
    assert (one.directory, one.readonly) == (str(path), False)
    assert mounts == [(one.name, "/var/lib/app", "defaults,nofail")]
    assert [disk.name for disk in devices.disks] == ["root", "cloudinit"]


async def test_folders_with_one_last_name_have_their_own_tags_and_one_folder_has_one(
    tmp_path: Path, fleet: Fleet, kubelet: Kubelet
) -> None:
    first, second = folder(tmp_path, "a", "Data.1"), folder(tmp_path, "b", "Data.1")
    devices, mounts = await devices_of(
        fleet,
        kubelet,
        mount(first, "/x") | {"readonly": True},
        mount(second, "/y") | {"readonly": True},
        mount(Path(f"{first}/"), "/z"),
    )
    found = {one.directory: one for one in devices.filesystems}
    assert set(found) == {str(first), str(second)}
    assert found[str(first)].name != found[str(second)].name
    assert [found[str(one)].readonly for one in (first, second)] == [False, True]
    assert [(path, options) for _, path, options in mounts] == [
        ("/x", "defaults,nofail,ro"),
        ("/z", "defaults,nofail"),
        ("/y", "defaults,nofail,ro"),
    ]


async def test_small_volumes_and_tokens_are_no_folders_of_the_guest(
    tmp_path: Path, fleet: Fleet, kubelet: Kubelet
) -> None:
    token = volume(tmp_path, "projected", {"token": "t"})
    devices, mounts = await devices_of(
        fleet,
        kubelet,
        mount(token, "/var/run/secrets/kubernetes.io/serviceaccount"),
        mount(volume(tmp_path / "2", "configmap", {"a": "b"}), "/etc/app"),
        mount(volume(tmp_path / "3", "secret", {"a": "b"}), "/etc/secret"),
        mount(folder(tmp_path, "srv"), "/var/run/secrets/kubernetes.io/serviceaccount"),
    )
    assert (devices.filesystems, mounts) == ((), [])


async def refusal(kubelet: Kubelet, *mounts: Plain) -> str:
    sandbox_id = await kubelet.sandbox()
    await kubelet.call("PullImage", image={"image": "tiny"})
    config = {"metadata": {"name": "vm"}, "image": {"image": "tiny"}, "mounts": list(mounts)}
    code, text = await kubelet.refused("CreateContainer", pod_sandbox_id=sandbox_id, config=config)
    assert code == StatusCode.INVALID_ARGUMENT
    return text


async def test_the_root_of_the_node_and_a_path_that_nobody_can_mount_are_refused(
    tmp_path: Path, fleet: Fleet, kubelet: Kubelet
) -> None:
    assert "other than /" in await refusal(kubelet, mount(Path("/"), "/host"))
    assert "the folder" in await refusal(kubelet, mount(folder(tmp_path, "a"), "/a b"))
    assert not fleet.created


async def test_a_socket_of_the_node_is_refused(
    tmp_path: Path, fleet: Fleet, kubelet: Kubelet
) -> None:
    path = tmp_path / "docker.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        assert "neither a folder nor a file" in await refusal(kubelet, mount(path, "/d.sock"))
    assert not fleet.created
