"""Declares the proxy's settings."""

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from virtbus.bus.runtime.settings import ServiceSettings


class Settings(ServiceSettings):
    """Settings of `virtbus-criproxy`."""

    service: ClassVar[str] = "criproxy"

    listen: Path | None = Field(
        None, description="UNIX socket for kubelet; empty: criproxy.sock in run_dir"
    )
    container_runtime: Path = Field(
        Path("/run/containerd/containerd.sock"),
        description="UNIX socket of the runtime of containers",
    )
    vm_runtime: Path | None = Field(
        None, description="UNIX socket of virtbus-cri; empty: cri.sock in run_dir"
    )
    vm_handlers: tuple[str, ...] = Field(
        ("virtbus",), description="handlers of RuntimeClasses whose pods are VMs, as in cri.toml"
    )
    answer_limit_s: float = Field(
        5.0,
        gt=0,
        le=60,
        description="seconds after which a runtime that does not answer a list counts as away",
    )
    away_grace_s: float = Field(
        10.0,
        ge=0,
        le=600,
        description=(
            "seconds during which a restart of the runtime of containers is no false condition"
        ),
    )

    @property
    def socket(self) -> Path:
        return self.listen or self.run_dir / "criproxy.sock"

    @property
    def vm_socket(self) -> Path:
        return self.vm_runtime or self.run_dir / "cri.sock"
