"""The volumes of pods: small files become files of the guest, others are refused with a reason."""

import base64
from pathlib import Path
from typing import Any

import pytest
from grpc import StatusCode
from services.cri.tests.world import Fleet, Kubelet

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
    (created,) = fleet.asked("vm.create")
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
        ("/var/lib/kubelet/pods/0c5f/volumes/kubernetes.io~empty-dir/tmp", "an emptyDir"),
        ("/var/lib/kubelet/pods/0c5f/volumes/kubernetes.io~csi/pvc/mount", "a PersistentVolume"),
        ("/var/lib/kubelet/pods/0c5f/volumes/virtlet~flexvolume_driver/d", "the flexvolume"),
        ("/var/lib/kubelet/pods/0c5f/volume-subpaths/tmp/vm/0", "subPath"),
        ("/var/lib/kubelet/pods/0c5f/volumes/kubernetes.io~other/d", "of the kind"),
        ("/srv/data", "a hostPath"),
    ],
)
async def test_a_volume_that_needs_a_shared_folder_is_refused_by_its_name(
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
    assert not fleet.vms


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
    assert not fleet.vms
