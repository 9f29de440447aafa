"""Says what becomes of a pod's mounts: files in the guest, nothing, or a refusal with the reason.

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
_KIND = re.compile(r"/pods/[^/]+/volumes/([^/]+)/")
AS_FILES = frozenset(
    f"kubernetes.io~{kind}" for kind in ("configmap", "secret", "projected", "downward-api")
)
"""Volumes of small files, which become files of the guest's first boot."""
FLEXVOLUME = "virtlet~flexvolume_driver"
NAMES = {
    "kubernetes.io~empty-dir": "an emptyDir",
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


def of_kubelet(mount: Mount) -> bool:
    """Return True for a mount that kubelet adds to each container, and no guest gets."""
    path = mount.container_path
    return path in OF_KUBELET or path == SERVICE_ACCOUNT or path.endswith("termination-log")


def kind(mount: Mount) -> str:
    """Return the folder that names the kind of a volume; empty for a path of the node."""
    found = _KIND.search(mount.host_path)
    return found[1] if found else ""


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
        if not of_kubelet(mount) and mount not in files:
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
    if found == FLEXVOLUME:
        return f"the flexvolume at {mount.container_path} cannot be given to a VM yet; remove it"
    what = NAMES.get(found, f"a volume of the kind {found}")
    return f"{what} at {mount.container_path} {_SHARED}"
