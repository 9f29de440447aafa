"""The controller's settings."""

from typing import ClassVar

from pydantic import Field

from virtbus.bus.runtime.settings import ServiceSettings
from virtbus.controller.core.placement import CPU_OVERCOMMIT
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
        description="client watches served at once; one account has three quarters at most",
    )

    volumes_per_namespace: int = Field(
        1000,
        ge=1,
        description="volumes of a namespace at most; creates at the same moment may exceed it by "
        "a few",
    )
    volumes_in_all: int = Field(
        20_000, ge=1, description="volumes of all namespaces at most, as volumes_per_namespace"
    )

    snapshots_per_namespace: int = Field(
        1000, ge=1, description="snapshots of a namespace at most, as volumes_per_namespace"
    )
    snapshots_in_all: int = Field(
        20_000, ge=1, description="snapshots of all namespaces at most, as volumes_per_namespace"
    )

    image_names_per_namespace: int = Field(
        1000,
        ge=1,
        description="image names of a namespace, or of the whole fleet, at most; as "
        "volumes_per_namespace",
    )
    image_names_in_all: int = Field(
        10_000, ge=1, description="image names on the bus at most, as volumes_per_namespace"
    )
    operations_per_namespace: int = Field(
        100,
        ge=1,
        description="operations of a namespace at most, those that ended within operation_keep_s "
        "included",
    )
    operations_in_all: int = Field(
        10_000,
        ge=1,
        description="operations of all namespaces at most, as operations_per_namespace",
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
            "argv that turns a Down node off for sure, {node} being its id; exit code 0 is "
            "taken as proof, and its VMs may then start elsewhere; empty: only people fence"
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
            "access to names of VMs: a namespace to the others whose guests may resolve the names "
            "of its VMs, or to `*` for all; the same on every controller"
        ),
    )

    @property
    def bus_user(self) -> str:
        return "controller"
