"""Defines the settings of the controller."""

from ipaddress import IPv4Network, IPv6Network
from typing import ClassVar

from pydantic import Field

from virtbus.bus.runtime.settings import ServiceSettings
from virtbus.controller.core.placement import CPU_OVERCOMMIT
from virtbus.controller.core.quotas import Quota
from virtbus.controller.core.volume_quota import VolumeQuota
from virtbus.schemas.quantity import Bytes
from virtbus.schemas.vm import Overcommit


class Settings(ServiceSettings):
    """Settings of `virtbus-controller`."""

    service: ClassVar[str] = "controller"

    sweep_interval_s: float = Field(
        60.0, ge=1, description="seconds between sweeps for orphan claims and secrets"
    )
    orphan_grace_s: float = Field(
        60.0, ge=1, description="age in seconds at which a claim without a record is an orphan"
    )
    watches_at_once: int = Field(
        1000,
        ge=1,
        description="maximum number of client watches; one account gets at most three quarters",
    )

    volumes_per_namespace: int = Field(
        1000,
        ge=1,
        description="maximum number of volumes of a namespace; concurrent creates may exceed it by "
        "a few",
    )
    volumes_in_all: int = Field(
        20_000,
        ge=1,
        description="maximum number of volumes of all namespaces; may be exceeded, too",
    )

    volume_bytes_per_namespace: Bytes = Field(
        0,
        ge=0,
        description="bytes that the volumes of a namespace may have together, by their sizes; "
        "0: no limit; as volumes_per_namespace",
    )
    volume_bytes_in_all: Bytes = Field(
        0, ge=0, description="bytes that all volumes may have together; 0: no limit"
    )

    snapshots_per_namespace: int = Field(
        1000, ge=1, description="snapshots of a namespace at most, as volumes_per_namespace"
    )
    snapshots_in_all: int = Field(
        20_000, ge=1, description="snapshots of all namespaces at most, as volumes_per_namespace"
    )

    backup_schedules_per_namespace: int = Field(
        1000, ge=1, description="schedules of a namespace at most, as volumes_per_namespace"
    )
    backup_schedules_in_all: int = Field(
        10_000, ge=1, description="schedules of all namespaces at most, as volumes_per_namespace"
    )

    image_names_per_namespace: int = Field(
        1000,
        ge=1,
        description="maximum number of image names of a namespace, or of the whole fleet; as "
        "volumes_per_namespace",
    )
    image_names_in_all: int = Field(
        10_000, ge=1, description="maximum number of image names on the bus; may be exceeded, too"
    )
    networks_per_namespace: int = Field(
        100,
        ge=1,
        description="network objects of a namespace, or of all namespaces together, at most; as "
        "volumes_per_namespace",
    )
    networks_in_all: int = Field(
        2000, ge=1, description="network objects on the bus at most, as volumes_per_namespace"
    )
    security_groups_per_namespace: int = Field(
        200, ge=1, description="security groups of a namespace at most; as volumes_per_namespace"
    )
    security_groups_in_all: int = Field(
        5000, ge=1, description="security groups on the bus at most, as volumes_per_namespace"
    )
    addresses_per_network: int = Field(
        10_000,
        ge=1,
        description="claimed addresses of a network object at most; as volumes_per_namespace",
    )
    addresses_in_all: int = Field(
        100_000, ge=1, description="claimed addresses on the bus at most, as volumes_per_namespace"
    )
    client_subnets: tuple[IPv4Network | IPv6Network, ...] = Field(
        (),
        description=(
            "networks from which clients may choose the subnets of nat, routed and overlay "
            "networks; empty: only the credentials admin make such networks"
        ),
    )
    operations_per_namespace: int = Field(
        100,
        ge=1,
        description="maximum number of open operations of a namespace; while open and ended ones "
        "together are more, those that ended first are removed before operation_keep_s",
    )
    operations_in_all: int = Field(
        10_000,
        ge=1,
        description="operations_per_namespace, for all namespaces together",
    )
    operation_keep_s: float = Field(
        86_400.0,
        ge=1,
        le=86_400,
        description="seconds that an operation and its file are kept after its end; the same on "
        "every controller",
    )

    fence_command: tuple[str, ...] = Field(
        (),
        max_length=64,
        description=(
            "command and arguments that turn a Down node off; {node} is its id; exit code 0 is "
            "proof that the node is off, and its VMs may start elsewhere; empty: only people fence"
        ),
    )
    fence_timeout_s: float = Field(
        60.0, ge=1, le=600, description="seconds after which fence_command is ended and has failed"
    )
    overcommit: Overcommit = Field(
        Overcommit.SHARED,
        description="strict: every VM gets CPUs and memory of its own, as if its spec said "
        "placement.overcommit: strict; the same on every controller",
    )

    vcpus_per_cpu: float = Field(
        CPU_OVERCOMMIT,
        gt=0,
        le=1000,
        description=(
            "vCPUs that may be allocated for each CPU of a host; one on hosts with strict "
            "VMs; the same on every controller"
        ),
    )

    names_open_to: dict[str, tuple[str, ...]] = Field(
        {},
        description=(
            "by namespace of VMs: the other namespaces whose guests may resolve the names "
            "of its VMs, or `*` for all; the same on every controller"
        ),
    )

    @property
    def bus_user(self) -> str:
        return "controller"

    @property
    def backup_schedule_quota(self) -> Quota:
        return Quota(self.backup_schedules_per_namespace, self.backup_schedules_in_all)

    @property
    def operation_quota(self) -> Quota:
        return Quota(self.operations_per_namespace, self.operations_in_all)

    @property
    def volume_quota(self) -> VolumeQuota:
        number = Quota(self.volumes_per_namespace, self.volumes_in_all)
        return VolumeQuota(number, self.volume_bytes_per_namespace, self.volume_bytes_in_all)
