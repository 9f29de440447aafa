"""Defines the simulator's settings: those of a nodeagent, and the number and size of nodes."""

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
            "number of nodes `<node>-000`, `<node>-001` and so on, whose state ends with the "
            "process; 0: one node `<node>` with its state on disk"
        ),
    )
    first: int = Field(0, ge=0, le=999, description="number of the first node")
    cpus: int = Field(64, ge=1, description="CPUs that each of many nodes reports")
    memory: Bytes = Field(
        256 * 1024**3, ge=1024**3, description="memory that each of many nodes reports"
    )
    ask_after_s: float = Field(
        0.001, gt=0, description="seconds; simulated imaged and netd report only when asked"
    )

    @property
    def nodes(self) -> tuple[str, ...]:
        """Return the ids of the nodes; none if `count` is 0."""
        return tuple(f"{self.node}-{self.first + i:03d}" for i in range(self.count))

    @property
    def bus_user(self) -> str:
        return f"node-{self.node}"
