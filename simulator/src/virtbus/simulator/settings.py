"""Defines the simulator's settings: all nodeagent settings, and the number and size of nodes."""

from typing import ClassVar

from pydantic import Field

from virtbus.nodeagent.settings import Settings
from virtbus.schemas.quantity import Bytes


class SimulatorSettings(Settings):
    """Settings of `virtbus-simulator`."""

    service: ClassVar[str] = "simulator"

    count: int = Field(
        0,
        ge=0,
        le=1000,
        description=(
            "number of nodes, named `<node>-<number>` from `first` on; their state is lost when "
            "the process ends. With 0 there is one node, `<node>`, with its state on disk"
        ),
    )
    first: int = Field(0, ge=0, le=999, description="number of the first node")
    cpus: int = Field(64, ge=1, description="CPUs that each node reports, if `count` is not 0")
    memory: Bytes = Field(
        256 * 1024**3, ge=1024**3, description="memory that each node reports, if `count` is not 0"
    )
    ask_after_s: float = Field(
        0.001,
        gt=0,
        description=(
            "silence in seconds after which imaged and netd are asked; short, because the "
            "simulated ones report only when asked"
        ),
    )

    @property
    def nodes(self) -> tuple[str, ...]:
        """Return the ids of the numbered nodes; empty if `count` is 0."""
        return tuple(f"{self.node}-{self.first + i:03d}" for i in range(self.count))

    @property
    def bus_user(self) -> str:
        return f"node-{self.node}"
