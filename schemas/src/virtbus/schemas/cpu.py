"""The guest's CPU."""

from operator import not_
from typing import Annotated, Literal

from pydantic import Field, StringConstraints, ValidationInfo, field_validator

from virtbus.schemas.model import StrictModel
from virtbus.schemas.quantity import Count

CORES_MAX = 256

_CpuName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]


class CpuFeature(StrictModel):
    """A feature that differs from the CPU model, with libvirt's name and policy."""

    name: _CpuName
    policy: Literal["force", "require", "optional", "disable", "forbid"] = "require"


class Cpu(StrictModel):
    """The guest's CPU: its topology, model and features. vCPUs = sockets * cores * threads."""

    sockets: Count = Field(1, ge=1, le=256)
    cores: Count = Field(1, ge=1, le=CORES_MAX)
    threads: Count = Field(1, ge=1, le=8)
    model: _CpuName | None = None
    features: tuple[CpuFeature, ...] = Field((), max_length=64, exclude_if=not_)
    """Features may be given only with a `model`."""

    @field_validator("features")
    @classmethod
    def _of_a_model(
        cls, features: tuple[CpuFeature, ...], info: ValidationInfo
    ) -> tuple[CpuFeature, ...]:
        if features and info.data.get("model") is None:
            msg = "features need a model"
            raise ValueError(msg)
        return features

    @property
    def vcpus(self) -> int:
        return self.sockets * self.cores * self.threads
