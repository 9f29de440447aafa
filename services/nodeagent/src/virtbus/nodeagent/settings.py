"""Defines the nodeagent's settings."""

from pathlib import Path
from typing import ClassVar, Self

from pydantic import Field, model_validator

from virtbus.bus.runtime.pool_settings import check_pools
from virtbus.bus.runtime.settings import CONFIG_DIR, ServiceSettings
from virtbus.schemas.filesystem import HostPath
from virtbus.schemas.quantity import Bytes
from virtbus.schemas.volume_ref import DevicePattern


class Settings(ServiceSettings):
    """Settings of `virtbus-nodeagent`."""

    service: ClassVar[str] = "nodeagent"

    libvirt_uri: str = Field("qemu:///system", description="the hypervisor")
    wrapper: Path = Field(
        Path("/usr/local/libexec/virtbus/vmwrapper"),
        description="the program that libvirt runs instead of QEMU; netd installs it",
    )
    accelerator: str = Field(
        "auto", pattern="^(auto|kvm|tcg)$", description="auto: KVM if a probe guest runs"
    )
    labels: dict[str, str] = Field(default_factory=dict, description="labels of this node")
    boot_id: str = Field(
        "",
        description=(
            "id of this boot of the host; empty: the kernel's. The unit passes systemd's, "
            "because the kernel's is hidden there"
        ),
    )
    heartbeat_s: float = Field(
        4.0, gt=0, description="seconds between liveness records; their TTL is 15 s"
    )
    resync_s: float = Field(
        300.0, gt=0, description="seconds between full comparisons of bus and host"
    )
    compare_s: float = Field(
        20.0,
        gt=0,
        description="seconds between comparisons with libvirt, which correct lost events",
    )
    orphan_grace_s: float = Field(
        600.0,
        gt=0,
        description=(
            "seconds after which a VM's leftovers without a record or a guest are removed; "
            "its disks go to the quarantine"
        ),
    )
    ask_after_s: float = Field(
        0.25, gt=0, description="silence in seconds after which imaged and netd are asked"
    )
    pools_file: Path = Field(
        CONFIG_DIR / "pools.toml",
        description="the pools of this node for volumes, the same file as imaged's",
    )
    devices_allowed: tuple[DevicePattern, ...] = Field(
        (),
        description=(
            "block devices that VM pods may get as disks (PersistentVolumes of the mode Block), as "
            "patterns of paths: /dev/loop*, /dev/disk/by-id/*"
        ),
    )
    directories_allowed: dict[HostPath, tuple[str, ...]] = Field(
        {},
        description=(
            "directories of the host that VM pods may mount, with all directories below them; each "
            "with the namespaces whose VMs may, too, or `*` for all"
        ),
    )
    min_free_bytes: Bytes = Field(
        2 * 1024**3,
        ge=0,
        description=(
            "bytes of state_dir's disk below which this node gets no VM; records, logs and "
            "guests' writes need them"
        ),
    )
    min_free_ratio: float = Field(
        0.01, ge=0, lt=1, description="the same as a share of the disk; the larger value applies"
    )
    kubernetes_cpus: float = Field(
        0,
        ge=0,
        description=(
            "CPUs that kubelet gives to pods (the Node's Allocatable); other VMs do not get them, "
            "and VM pods count inside them. 0: VM pods count as other VMs, and containers do not"
        ),
    )
    kubernetes_memory: Bytes = Field(0, ge=0, description="the same for memory")
    fast_start: bool = Field(
        False,
        description=(
            "benchmarks only: skip libvirt's CPU queries (qemu:del, see ADR 0007); it is "
            "possible that a saved domain cannot be restored"
        ),
    )

    @model_validator(mode="after")
    def _has_pools(self) -> Self:
        check_pools(self.pools_file)
        return self

    def disk_reserve_bytes(self, disk_bytes: int) -> int:
        """Return the bytes that stay free on a disk of this size."""
        return max(self.min_free_bytes, int(disk_bytes * self.min_free_ratio))
