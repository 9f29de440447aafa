"""Decides the form of a pod's mounts in its VM: files, a disk, a directory, none, or a refusal.

kubelet describes a mount only by a path of the node. For a volume, this path contains the kind and
the name of the volume.
"""

import re
from collections.abc import Iterable, Iterator

from virtbus.cri.core.configs import Device, Mount
from virtbus.schemas.errors import Detail

OF_KUBELET = frozenset({"/etc/hosts", "/dev/termination-log"})
"""Files that kubelet mounts into each container. A guest gets none of them: `pod_dns.py` adds the
pod's host aliases to the guest's own /etc/hosts.
"""
SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
"""The folder with the token of the pod's service account. No guest gets this folder."""
_KIND = re.compile(r"/pods/[^/]+/volumes/([^/]+)/([^/]+)")
AS_FILES = frozenset(
    f"kubernetes.io~{kind}" for kind in ("configmap", "secret", "projected", "downward-api")
)
"""Kinds of volumes that contain small files. The guest gets these files at its first boot."""
EMPTY_DIR = "kubernetes.io~empty-dir"
FLEXVOLUME = "virtlet~flexvolume_driver"
QCOW2, RAW, CEPH = "qcow2", "raw", "ceph"
ROOT_PATH = "/"
"""The devicePath of a block volume that is the root disk, as in Virtlet."""
NAMES = {
    "kubernetes.io~csi": "a PersistentVolume with a file system",
    "kubernetes.io~local-volume": "a PersistentVolume with a file system",
    "kubernetes.io~nfs": "a volume of NFS",
    "": "a hostPath",
}
"""By kind of a volume: the name of this kind in messages."""


_SUBPATH = re.compile(r"/pods/[^/]+/volume-subpaths/")
_NO_FOLDER = "is neither a folder nor a file of the node; a guest gets folders and files only"


_FLEXVOLUMES = {
    RAW: "names no block device of the node; its option `path` begins with /dev/",
    CEPH: (
        "is a disk of Ceph that no pool of the kind rbd of this node assigns to the pod's "
        'namespace; its operator adds NAMESPACE.NAME = "POOL/IMAGE" to pools.toml'
    ),
}


def of_kubelet(mount: Mount) -> bool:
    """Return True for a mount that kubelet adds to each container. No guest gets such a mount."""
    path = mount.container_path
    return path in OF_KUBELET or path == SERVICE_ACCOUNT or path.endswith("termination-log")


def kind(mount: Mount) -> str:
    """Return the kind of the mount's volume; empty if the mount is no volume of kubelet's."""
    found = _KIND.search(mount.host_path)
    return found[1] if found else ""


def volume_name(mount: Mount) -> str:
    """Return the name of the mount's volume in the pod; empty if `kind` is empty."""
    found = _KIND.search(mount.host_path)
    return found[2] if found else ""


def is_disk(mount: Mount) -> bool:
    """Return True for a volume that becomes a disk: an emptyDir, or a usable flexvolume.

    A flexvolume is usable if it is a new empty disk, a permitted device, or an assigned Ceph disk.
    """
    if kind(mount) == EMPTY_DIR:
        return not mount.memory and not mount.is_file
    form = (mount.options or {}).get("type")
    usable = form == QCOW2 or (form == RAW and mount.permitted) or (form == CEPH and mount.assigned)
    return kind(mount) == FLEXVOLUME and bool(usable)


def is_directory(mount: Mount) -> bool:
    """Return True for a folder of the node that the guest mounts by virtiofs.

    As in Virtlet, emptyDirs, flexvolumes and volumes of small files are no directories. The folder
    with the token of the service account is no directory, either.
    """
    other = {EMPTY_DIR, FLEXVOLUME} | AS_FILES
    return mount.is_folder and kind(mount) not in other and not of_kubelet(mount)


def as_files(mounts: Iterable[Mount]) -> tuple[Mount, ...]:
    """Return the mounts that the guest gets as files: volumes of small files, and single files."""
    return tuple(
        mount
        for mount in mounts
        if not of_kubelet(mount) and (mount.is_file or kind(mount) in AS_FILES)
    )


def refusals(mounts: tuple[Mount, ...], devices: tuple[Device, ...]) -> Iterator[Detail]:
    """Yield the mounts and devices that a VM cannot have."""
    files = as_files(mounts)
    for index, mount in enumerate(mounts):
        usable = of_kubelet(mount) or is_disk(mount) or is_directory(mount)
        if not usable and mount not in files:
            yield Detail(path=f"mounts[{index}]", message=_why(mount))
    for index, device in enumerate(devices):
        if device.container_path == ROOT_PATH and "w" not in device.permissions:
            message = "a root disk cannot be read-only; remove readOnly from the volume"
            yield Detail(path=f"devices[{index}]", message=message)
        elif not device.block_path:
            message = (
                f"the device at {device.container_path} is no block device of the node: "
                f"{device.host_path}; remove it from the pod"
            )
            yield Detail(path=f"devices[{index}]", message=message)


def _why(mount: Mount) -> str:
    found = kind(mount)
    if not found and _SUBPATH.search(mount.host_path):
        return f"the subPath at {mount.container_path} {_NO_FOLDER}"
    if found == EMPTY_DIR:
        return (
            f"the emptyDir at {mount.container_path} has the medium Memory, and a guest's memory "
            "is its own; remove the medium, or mount a tmpfs in the guest"
        )
    if found == FLEXVOLUME:
        return f"the flexvolume at {mount.container_path} {_why_flexvolume(mount)}"
    what = NAMES.get(found, f"a volume of the kind {found}")
    return f"{what} at {mount.container_path} {_NO_FOLDER}"


def _why_flexvolume(mount: Mount) -> str:
    if mount.options is None:
        return (
            "has no options: the driver virtlet/flexvolume_driver of virtbus is not installed on "
            "this node; run `virtbus cri install` there"
        )
    if mount.block_path and not mount.permitted:
        return (
            f"names the device {mount.block_path}, which is not among those of this node's "
            "runtime; its operator adds it to flexvolume_devices in cri.toml"
        )
    return _FLEXVOLUMES.get(
        mount.options.get("type", ""), "has an unknown type; use qcow2, raw or ceph"
    )
