"""Defines the settings of virtbus-cri."""

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from virtbus.bus.runtime.settings import CONFIG_DIR, ServiceSettings
from virtbus.schemas.quantity import Bytes
from virtbus.schemas.vm import DISK_MAX, DISK_MIN
from virtbus.schemas.volume_ref import DevicePattern


class Settings(ServiceSettings):
    """Settings of `virtbus-cri`."""

    service: ClassVar[str] = "cri"

    listen: Path | None = Field(
        None, description="UNIX socket for kubelet; empty: cri.sock in run_dir"
    )
    pod_network: str = Field(
        "default",
        pattern=r"^[a-z0-9][a-z0-9-]{0,62}$",
        description="network of the pods: `default`, or a CNI conflist of this node",
    )
    runtime_handlers: tuple[str, ...] = Field(
        ("virtbus",), description="handlers of RuntimeClasses whose pods become VMs"
    )
    cgroup_driver: str = Field(
        "systemd",
        pattern="^(systemd|cgroupfs)$",
        description="cgroup driver for kubelet, the same as that of the other runtime of the node",
    )
    empty_dir_bytes: Bytes = Field(
        10 * 1024**3,
        ge=DISK_MIN,
        le=DISK_MAX,
        description="size of an emptyDir's disk, unless the pod's annotation gives one",
    )

    flexvolume_devices: tuple[DevicePattern, ...] = Field(
        (),
        description=(
            "block devices that any author of a pod may name in a flexvolume of the type raw, as "
            "patterns of paths; the agent's devices_allowed must permit them, too"
        ),
    )
    pools_file: Path = Field(
        CONFIG_DIR / "pools.toml",
        description="the pools of this node for flexvolumes of the type ceph, the agent's file",
    )
    kubeconfig: Path | None = Field(
        None,
        description=(
            "kubeconfig for Virtlet's objects of the cluster, for the ConfigMaps and Secrets in "
            "Virtlet's annotations, and for the hostAliases of pods; unset: none is read"
        ),
    )
    emulators_dir: Path = Field(
        Path("/run/libvirt/qemu"), description="folder of the process ids of libvirt's emulators"
    )

    @property
    def socket(self) -> Path:
        return self.listen or self.run_dir / "cri.sock"

    @property
    def image_names(self) -> Path:
        """Return the folder of the cluster's image names, which imaged reads."""
        return self.run_dir / "image-names"
