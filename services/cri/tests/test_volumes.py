"""The volumes of pods: small files, disks of the VM, and refusals with a reason."""

import base64
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from grpc import StatusCode
from services.cri.tests.world import DIGEST, Fleet, Kubelet, cri, sandbox

from virtbus.cri.edge.volume_files import in_memory

Plain = dict[str, Any]


def volume(root: Path, kind: str, files: dict[str, str], mode: int = 0o644) -> Path:
    """Write a volume as kubelet does: the files are links to the current version."""
    folder = root / "pods" / "0c5f" / "volumes" / f"kubernetes.io~{kind}" / "data"
    version = folder / "..2026_11_25"
    for name, content in files.items():
        path = version / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
        path.chmod(mode)
        first = name.partition("/")[0]
        if not (folder / first).is_symlink():
            (folder / first).symlink_to(f"..data/{first}")
    (folder / "..data").symlink_to("..2026_11_25")
    return folder


def mount(path: Path, at: str) -> Plain:
    """Return a mount of a container."""
    return {"host_path": str(path), "container_path": at}


async def written(fleet: Fleet, kubelet: Kubelet, *mounts: Plain) -> dict[str, tuple[str, str]]:
    """Return the files of the guest of a pod with these mounts: content and mode by path."""
    await kubelet.container(await kubelet.sandbox(), mounts=mounts)
    (created,) = fleet.created
    files = created["spec"]["volumes"][1]["cloud_init_no_cloud"].get("write_files", ())
    found = [(one["path"], one["content_base64"], one.get("mode", "0644")) for one in files]
    assert len({path for path, _, _ in found}) == len(found)
    return {path: (base64.b64decode(text).decode(), mode) for path, text, mode in found}


@pytest.mark.parametrize("kind", ["configmap", "secret", "projected", "downward-api"])
async def test_each_file_of_a_small_volume_is_in_the_guest_once(
    tmp_path: Path, fleet: Fleet, kubelet: Kubelet, kind: str
) -> None:
    folder = volume(tmp_path, kind, {"app.conf": "x = 1\n", "tls/key": "secret"}, 0o640)
    assert await written(fleet, kubelet, mount(folder, "/etc/app/")) == {
        "/etc/app/app.conf": ("x = 1\n", "0640"),
        "/etc/app/tls/key": ("secret", "0640"),
    }


async def test_a_single_file_is_at_its_own_path(
    tmp_path: Path, fleet: Fleet, kubelet: Kubelet
) -> None:
    path = tmp_path / "pods" / "0c5f" / "volume-subpaths" / "conf" / "vm" / "0"
    path.parent.mkdir(parents=True)
    path.write_text("one")
    found = await written(fleet, kubelet, mount(path, "/etc/one.conf"))
    assert found == {"/etc/one.conf": ("one", "0644")}


async def test_no_guest_gets_the_token_of_its_service_account(
    tmp_path: Path, fleet: Fleet, kubelet: Kubelet
) -> None:
    folder = volume(tmp_path, "projected", {"token": "t", "ca.crt": "c"})
    at = "/var/run/secrets/kubernetes.io/serviceaccount"
    assert await written(fleet, kubelet, mount(folder, at)) == {}
    assert [disk.name for disk in fleet.vm.spec.domain.devices.disks] == ["root", "cloudinit"]


async def test_the_files_are_not_stored_on_the_node(
    tmp_path: Path, fleet: Fleet, kubelet: Kubelet
) -> None:
    folder = volume(tmp_path, "secret", {"password": "very secret"})
    await written(fleet, kubelet, mount(folder, "/etc/app"))
    secret = base64.b64encode(b"very secret")
    for path in (tmp_path / "state" / "cri").rglob("*"):
        assert not path.is_file() or secret not in path.read_bytes()


@pytest.mark.parametrize(
    ("host_path", "word"),
    [
        ("/var/lib/kubelet/pods/0c5f/volumes/kubernetes.io~csi/pvc/mount", "a PersistentVolume"),
        ("/var/lib/kubelet/pods/0c5f/volumes/virtlet~flexvolume_driver/d", "the flexvolume"),
        ("/var/lib/kubelet/pods/0c5f/volume-subpaths/tmp/vm/0", "subPath"),
        ("/var/lib/kubelet/pods/0c5f/volumes/kubernetes.io~other/d", "of the kind"),
        ("/srv/data", "a hostPath"),
    ],
)
async def test_a_volume_that_is_no_folder_of_the_node_is_refused_by_its_name(
    fleet: Fleet, kubelet: Kubelet, host_path: str, word: str
) -> None:
    sandbox_id = await kubelet.sandbox()
    await kubelet.call("PullImage", image={"image": "tiny"})
    config = {
        "metadata": {"name": "vm"},
        "image": {"image": "tiny"},
        "mounts": [{"host_path": host_path, "container_path": "/data"}],
    }
    code, text = await kubelet.refused("CreateContainer", pod_sandbox_id=sandbox_id, config=config)
    assert (code, word in text, "/data" in text) == (StatusCode.INVALID_ARGUMENT, True, True), text
    assert not fleet.created


KUBELET = "/var/lib/kubelet/pods/0c5f/volumes"


async def test_an_empty_dir_is_a_disk_that_the_guest_formats_and_mounts(
    fleet: Fleet, kubelet: Kubelet
) -> None:
    sandbox_id = await kubelet.sandbox(annotations={"virtbus.io/empty-dir-sizes": "cache=2Gi"})
    mounts = [
        mount(Path(f"{KUBELET}/kubernetes.io~empty-dir/cache"), "/var/cache/app"),
        mount(Path(f"{KUBELET}/kubernetes.io~empty-dir/cache"), "/srv") | {"readonly": True},
        mount(Path(f"{KUBELET}/kubernetes.io~empty-dir/tmp.1"), "/scratch"),
    ]
    await kubelet.container(sandbox_id, mounts=mounts)
    spec = fleet.vm.spec
    found = {one.name: one.empty_disk.capacity for one in spec.volumes if one.empty_disk}
    other = next(name for name in found if name != "cache-disk")
    assert found == {"cache-disk": 2 * 1024**3, other: 10 * 1024**3}
    assert [disk.name for disk in spec.domain.devices.disks] == ["root", "cloudinit", *found]
    seed = spec.volumes[1].cloud_init_no_cloud
    assert seed is not None
    assert [(one.volume, one.path, one.make_filesystem) for one in seed.mounts] == [
        ("cache-disk", "/var/cache/app", True),
        ("cache-disk", "/srv", True),
        (other, "/scratch", True),
    ]
    assert seed.mounts[1].options.endswith(",ro")


async def refusal(kubelet: Kubelet, *mounts: Plain) -> str:
    """Return the text with which a container with these mounts is refused."""
    sandbox_id = await kubelet.sandbox()
    await kubelet.call("PullImage", image={"image": "tiny"})
    config = {"metadata": {"name": "vm"}, "image": {"image": "tiny"}, "mounts": mounts}
    code, text = await kubelet.refused("CreateContainer", pod_sandbox_id=sandbox_id, config=config)
    assert code is StatusCode.INVALID_ARGUMENT
    return text


async def test_mounts_with_the_same_last_part_are_different_disks(
    fleet: Fleet, kubelet: Kubelet
) -> None:
    home = "/var/lib/kubelet/pods/0c5f/volumes/kubernetes.io~empty-dir"
    mounts = [
        {"host_path": f"{home}/{name}", "container_path": f"/{name}/data"} for name in ("a", "b")
    ]
    await kubelet.container(await kubelet.sandbox(), mounts=mounts)
    seed = fleet.vm.spec.volumes[1].cloud_init_no_cloud
    assert seed is not None
    found = {one.path: one.volume for one in seed.mounts}
    assert found == {"/a/data": "a-disk", "/b/data": "b-disk"}


async def test_a_wrong_size_of_an_empty_dir_is_refused_with_the_sandbox(kubelet: Kubelet) -> None:
    config = sandbox(annotations={"virtbus.io/empty-dir-sizes": "a=1Gi, b=much,c=1"})
    code, text = await kubelet.refused("RunPodSandbox", config=config)
    assert code is StatusCode.INVALID_ARGUMENT
    assert "'b=much'" in text
    assert "1 more" in text


async def test_a_path_that_no_guest_can_mount_is_refused(kubelet: Kubelet) -> None:
    text = await refusal(kubelet, mount(Path(f"{KUBELET}/kubernetes.io~empty-dir/a"), "/a b"))
    assert "cannot be a disk" in text


def test_folders_in_memory_are_known_by_the_table_of_mounts() -> None:
    table = (
        "36 35 98:0 / /pods/a\\040b rw,noatime master:1 - tmpfs tmpfs rw\n"
        "37 35 0:5 / /huge rw shared:3 - hugetlbfs none rw\n"
        "38 35 0:6 / /disk rw - ext4 /dev/vda rw\nnot a line\n"
    )
    assert in_memory(table) == {"/pods/a b", "/huge"}


async def test_an_empty_dir_in_memory_is_refused(
    tmp_path: Path, kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = f"{KUBELET}/kubernetes.io~empty-dir/a"
    table = tmp_path / "mountinfo"
    table.write_text(f"36 35 98:0 / {path} rw master:1 - tmpfs tmpfs rw\n")
    monkeypatch.setattr("virtbus.cri.edge.volume_files.MOUNTS", table)
    assert "medium Memory" in await refusal(kubelet, mount(Path(path), "/a"))


def flexvolume(root: Path, **options: str) -> Path:
    """Write a flexvolume as its driver does."""
    folder = root / "pods" / "0c5f" / "volumes" / "virtlet~flexvolume_driver" / "data"
    folder.mkdir(parents=True)
    (folder / "virtlet-flexvolume.json").write_text(json.dumps(options))
    return folder


@pytest.mark.parametrize(
    ("options", "size_bytes"),
    [
        ({}, 1024**3),
        ({"capacity": "1024MB"}, 1024 * 10**6),
        ({"capacity": "2048"}, 2 * 1024**3),
        ({"capacity": "2 GiB"}, 2 * 1024**3),
    ],
)
async def test_a_flexvolume_of_qcow2_is_a_disk_of_its_capacity(
    tmp_path: Path, fleet: Fleet, kubelet: Kubelet, options: dict[str, str], size_bytes: int
) -> None:
    folder = flexvolume(tmp_path, type="qcow2", **options)
    await kubelet.container(await kubelet.sandbox(), mounts=[mount(folder, "/data")])
    disk = fleet.vm.spec.volumes[2].empty_disk
    assert disk is not None
    assert disk.capacity == size_bytes


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"type": "ceph", "secret": "c2VjcmV0"}, "disk of Ceph"),
        ({"type": "raw", "path": "/dev/null"}, "no block device"),
        ({"type": "zfs"}, "unknown type"),
        ({}, "unknown type"),
        ({"type": "qcow2", "capacity": "lots"}, "'lots'"),
    ],
)
async def test_another_flexvolume_is_refused_by_its_type(
    tmp_path: Path, kubelet: Kubelet, options: dict[str, str], word: str
) -> None:
    text = await refusal(kubelet, mount(flexvolume(tmp_path, **options), "/data"))
    assert word in text
    assert "c2VjcmV0" not in text


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A link to a device of the node, as kubelet makes it; the device itself is pretended."""
    link = tmp_path / "pods" / "0c5f" / "volumeDevices" / "kubernetes.io~local-volume" / "pv-1"
    known = {str(link): "/dev/dm-3", "/dev/vg0/data": "/dev/dm-4"}
    monkeypatch.setattr(
        "virtbus.cri.edge.volume_files._block_device", lambda path: known.get(path, "")
    )
    return link


async def test_a_block_volume_is_a_disk_with_its_device_path_in_the_guest(
    fleet: Fleet, kubelet: Kubelet, device: Path
) -> None:
    devices = [{"host_path": str(device), "container_path": "/dev/xvdc", "permissions": "r"}]
    await kubelet.container(await kubelet.sandbox(), devices=devices)
    spec = fleet.vm.spec
    volume, disk = spec.volumes[2], spec.domain.devices.disks[2]
    assert volume.host_device is not None
    assert (volume.host_device.path, disk.name, disk.readonly) == ("/dev/dm-3", volume.name, True)
    seed = spec.volumes[1].cloud_init_no_cloud
    assert seed is not None
    assert [(one.volume, one.path) for one in seed.links] == [(volume.name, "/dev/xvdc")]


@pytest.fixture
async def permitting(
    tmp_path: Path, fleet: Fleet, device: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Kubelet]:
    """A node whose operator permits one device, by a link, to flexvolumes."""
    devices = tmp_path / "dev"
    (devices / "vg0").mkdir(parents=True)
    (devices / "vg0" / "data").symlink_to("/dev/dm-4")
    monkeypatch.setattr("virtbus.cri.edge.volume_files._DEVICES", devices)
    async with cri(tmp_path, fleet, flexvolume_devices=("/dev/vg0/*",)) as kubelet:
        yield kubelet


async def test_a_flexvolume_names_no_device_without_a_permission_of_its_own(
    tmp_path: Path, fleet: Fleet, kubelet: Kubelet, device: Path
) -> None:
    assert device.name
    text = await refusal(
        kubelet, mount(flexvolume(tmp_path, type="raw", path="/dev/vg0/data"), "/d")
    )
    assert "flexvolume_devices" in text
    assert not fleet.created


async def test_a_flexvolume_names_no_other_device_than_those_of_its_permission(
    tmp_path: Path, fleet: Fleet, permitting: Kubelet, device: Path
) -> None:
    folder = flexvolume(tmp_path, type="raw", path=str(device))
    assert "flexvolume_devices" in await refusal(permitting, mount(folder, "/data"))
    assert not fleet.created


@pytest.mark.parametrize(("part", "wanted"), [("", 1), ("-1", 1), ("0", None), ("3", 3)])
async def test_a_raw_flexvolume_is_a_device_with_a_partition_that_is_mounted(
    tmp_path: Path, fleet: Fleet, permitting: Kubelet, part: str, wanted: int | None
) -> None:
    folder = flexvolume(tmp_path, type="raw", path="/dev/vg0/data", part=part)
    await permitting.container(await permitting.sandbox(), mounts=[mount(folder, "/data")])
    host = fleet.vm.spec.volumes[2].host_device
    assert host is not None
    assert host.path == "/dev/dm-4"
    seed = fleet.vm.spec.volumes[1].cloud_init_no_cloud
    assert seed is not None
    (mounted,) = seed.mounts
    assert (mounted.partition, mounted.make_filesystem) == (wanted, None)


async def test_an_options_file_in_another_volume_has_no_effect(
    tmp_path: Path, fleet: Fleet, kubelet: Kubelet, device: Path
) -> None:
    assert device.name
    folder = tmp_path / "pods" / "0c5f" / "volumes" / "kubernetes.io~empty-dir" / "data"
    folder.mkdir(parents=True)
    options = {"type": "raw", "path": "/dev/vg0/data", "capacity": "1MiB"}
    (folder / "virtlet-flexvolume.json").write_text(json.dumps(options))
    await kubelet.container(await kubelet.sandbox(), mounts=[mount(folder, "/data")])
    disk = fleet.vm.spec.volumes[2].empty_disk
    assert disk is not None
    assert disk.capacity == 10 * 1024**3


async def test_a_qcow2_flexvolume_with_a_path_is_an_empty_disk(
    tmp_path: Path, fleet: Fleet, kubelet: Kubelet, device: Path
) -> None:
    assert device.name
    folder = flexvolume(tmp_path, type="qcow2", path="/dev/vg0/data")
    await kubelet.container(await kubelet.sandbox(), mounts=[mount(folder, "/data")])
    assert fleet.vm.spec.volumes[2].empty_disk is not None


async def test_a_device_at_the_root_is_the_root_disk_with_the_image(
    fleet: Fleet, kubelet: Kubelet, device: Path
) -> None:
    devices = [{"host_path": str(device), "container_path": "/", "permissions": "mrw"}]
    notes = {"VirtletRootVolumeSize": "4Gi"}
    await kubelet.container(await kubelet.sandbox(annotations=notes), devices=devices)
    spec = fleet.vm.spec
    assert [one.name for one in spec.domain.devices.disks] == ["root", "cloudinit"]
    root = spec.volumes[0].host_device
    assert root is not None
    assert (root.path, root.image) == ("/dev/dm-3", f"tiny@{DIGEST}")


async def test_devices_that_cannot_be_disks_are_refused_together(
    kubelet: Kubelet, device: Path
) -> None:
    devices = [
        {"host_path": str(device), "container_path": "/", "permissions": "mr"},
        {"host_path": "/dev/null", "container_path": "/dev/a"},
        {"host_path": str(device), "container_path": "relative"},
    ]
    sandbox_id = await kubelet.sandbox()
    await kubelet.call("PullImage", image={"image": "tiny"})
    config = {"metadata": {"name": "vm"}, "image": {"image": "tiny"}, "devices": devices}
    code, text = await kubelet.refused("CreateContainer", pod_sandbox_id=sandbox_id, config=config)
    assert code is StatusCode.INVALID_ARGUMENT
    assert "root disk cannot be read-only" in text
    assert "2 more" in text


async def test_files_that_are_too_large_or_lead_elsewhere_are_refused(
    tmp_path: Path, fleet: Fleet, kubelet: Kubelet
) -> None:
    sandbox_id = await kubelet.sandbox()
    await kubelet.call("PullImage", image={"image": "tiny"})
    large = volume(tmp_path / "a", "configmap", {"large": "x" * (256 * 1024 + 1)})
    foreign = volume(tmp_path / "b", "configmap", {"fine": "x"})
    (foreign / "shadow").symlink_to("/etc/hostname")
    for folder, word in ((large, "256 KiB"), (foreign, "leads out"), (tmp_path / "c", "")):
        path = folder
        if folder == tmp_path / "c":  # it vanished
            path = tmp_path / "pods" / "x" / "volumes" / "kubernetes.io~secret" / "gone"
        config = {
            "metadata": {"name": "vm"},
            "image": {"image": "tiny"},
            "mounts": [mount(path, "/data")],
        }
        code, text = await kubelet.refused(
            "CreateContainer", pod_sandbox_id=sandbox_id, config=config
        )
        assert (code, word in text) == (StatusCode.INVALID_ARGUMENT, True), text
    assert not fleet.created


async def test_generic_ephemeral_volumes_are_a_folder_and_a_disk(
    tmp_path: Path, fleet: Fleet, kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kubelet gives the runtime only the claim that it has made: paths of a CSI driver."""
    folder = tmp_path / "pods" / "0c5f" / "volumes" / "kubernetes.io~csi" / "pvc-1" / "mount"
    folder.mkdir(parents=True)
    block = "/var/lib/kubelet/plugins/kubernetes.io/csi/volumeDevices/pvc-2/dev/0c5f"
    monkeypatch.setattr(
        "virtbus.cri.edge.volume_files._block_device",
        lambda path: "/dev/loop7" if path == block else "",
    )
    devices = [{"host_path": block, "container_path": "/dev/scratch", "permissions": "mrw"}]
    await kubelet.container(
        await kubelet.sandbox(), mounts=[mount(folder, "/work")], devices=devices
    )
    spec = fleet.vm.spec
    assert [one.directory for one in spec.domain.devices.filesystems] == [str(folder)]
    assert [one.host_device.path for one in spec.volumes if one.host_device] == ["/dev/loop7"]
    seed = spec.volumes[1].cloud_init
    assert seed is not None
    assert [one.path for one in seed.mounts] == ["/work"]
    assert [one.path for one in seed.links] == ["/dev/scratch"]
