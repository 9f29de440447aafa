"""Says what becomes of a pod's mounts: files, a disk, nothing, or a refusal with the reason.

kubelet gives a container only paths of its node. The folder of a volume names the kind.
"""

import re
from collections.abc import Iterable, Iterator

from virtbus.cri.core.configs import Device, Mount
from virtbus.schemas.errors import Detail

OF_KUBELET = frozenset({"/etc/hosts", "/dev/termination-log"})
"""Files that kubelet mounts into each container. A guest has its own."""
SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
"""The token of the pod's service account. Guests do not get it."""
_KIND = re.compile(r"/pods/[^/]+/volumes/([^/]+)/([^/]+)")
AS_FILES = frozenset(
    f"kubernetes.io~{kind}" for kind in ("configmap", "secret", "projected", "downward-api")
)
"""Volumes of small files, which become files of the guest's first boot."""
EMPTY_DIR = "kubernetes.io~empty-dir"
FLEXVOLUME = "virtlet~flexvolume_driver"
QCOW2 = "qcow2"
NAMES = {
    "kubernetes.io~csi": "a PersistentVolume with a file system",
    "kubernetes.io~local-volume": "a PersistentVolume with a file system",
    "kubernetes.io~nfs": "a volume of NFS",
    "": "a hostPath",
}
"""The folder of a volume → its name for people."""


_SUBPATH = re.compile(r"/pods/[^/]+/volume-subpaths/")
_SHARED = (
    "needs a folder that node and guest share (virtiofs), which a VM does not have yet; "
    "use a ConfigMap or Secret for small files"
)


_FLEXVOLUMES = {
    "raw": "is a device of the node, which cannot be given to a VM yet; use a disk of type qcow2",
    "ceph": "is a disk of Ceph, for which this node has no pool; use a volume of the bus",
}


def of_kubelet(mount: Mount) -> bool:
    """Return True for a mount that kubelet adds to each container, and no guest gets."""
    path = mount.container_path
    return path in OF_KUBELET or path == SERVICE_ACCOUNT or path.endswith("termination-log")


def kind(mount: Mount) -> str:
    """Return the folder that names the kind of a volume; empty for a path of the node."""
    found = _KIND.search(mount.host_path)
    return found[1] if found else ""


def volume_name(mount: Mount) -> str:
    """Return the name of the volume in the pod; empty for a path of the node."""
    found = _KIND.search(mount.host_path)
    return found[2] if found else ""


def is_disk(mount: Mount) -> bool:
    """Return True for a volume that is an empty disk of the VM at first."""
    if kind(mount) == EMPTY_DIR:
        return not mount.memory and not mount.is_file
    options = mount.options or {}
    return kind(mount) == FLEXVOLUME and options.get("type") == QCOW2


def as_files(mounts: Iterable[Mount]) -> tuple[Mount, ...]:
    """Return the mounts whose files the guest gets: small volumes, and single files."""
    return tuple(
        mount
        for mount in mounts
        if not of_kubelet(mount) and (mount.is_file or kind(mount) in AS_FILES)
    )


def refusals(mounts: tuple[Mount, ...], devices: tuple[Device, ...]) -> Iterator[Detail]:
    """Yield the mounts and devices that a VM cannot have."""
    files = as_files(mounts)
    for index, mount in enumerate(mounts):
        if not of_kubelet(mount) and mount not in files and not is_disk(mount):
            yield Detail(path=f"mounts[{index}]", message=_why(mount))
    for index, device in enumerate(devices):
        message = (
            f"the block device {device.host_path} cannot be given to a VM yet; remove the volume "
            f"at {device.container_path}"
        )
        yield Detail(path=f"devices[{index}]", message=message)


def _why(mount: Mount) -> str:
    found = kind(mount)
    if not found and _SUBPATH.search(mount.host_path):
        return f"a folder of a volume (subPath) at {mount.container_path} {_SHARED}"
    if found == EMPTY_DIR:
        return (
            f"the emptyDir at {mount.container_path} has the medium Memory, and a guest's memory "
            "is its own; remove the medium, or mount a tmpfs in the guest"
        )
    if found == FLEXVOLUME:
        return f"the flexvolume at {mount.container_path} {_why_flexvolume(mount)}"
    what = NAMES.get(found, f"a volume of the kind {found}")
    return f"{what} at {mount.container_path} {_SHARED}"


def _why_flexvolume(mount: Mount) -> str:
    if mount.options is None:
        return (
            "has no options: the driver virtlet/flexvolume_driver of virtbus is not installed on "
            "this node; run `virtbus cri install` there"
        )
    return _FLEXVOLUMES.get(mount.options.get("type", ""), "has an unknown type; use qcow2")
