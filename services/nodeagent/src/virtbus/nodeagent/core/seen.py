"""What an agent tells of a VM beside its phase, and the conditions that follow from it."""

from dataclasses import dataclass

from virtbus.nodeagent.core.lifecycle import Phase
from virtbus.schemas.vm import Condition

READY, RESTART_REQUIRED, HELD = "Ready", "RestartRequired", "Held"
NETWORK_LOST = "NetworkLost"


@dataclass
class Seen:
    """What the agent tells of the VM beside its phase."""

    reason: str = ""
    message: str = ""
    started_ns: int | None = None
    restarts: int = 0
    attempt: int = 0
    ready: str = ""
    ready_ns: int = 0
    domain_hash: str = ""
    accelerator: str = ""
    network_lost: str = ""
    """Why the running guest is cut off, in netd's words."""
    disk_waits: str = ""
    """Why the guest is paused, where its disk had no room."""


def conditions(seen: Seen, phase: Phase, *, held: str, anew: bool) -> tuple[Condition, ...]:
    """The conditions of a VM.

    `held` says why nothing is started or ended, `anew` that the spec changed in what a running
    domain cannot take over.
    """
    runs = phase is Phase.RUNNING
    found = [
        Condition(
            type=READY,
            status=bool(seen.ready),
            reason=seen.ready or ("Booting" if runs else "NotRunning"),
            since_ns=seen.ready_ns,
        )
    ]
    if anew and runs:
        message = "stop and start the VM to take over its new spec"
        found.append(Condition(type=RESTART_REQUIRED, status=True, message=message))
    if seen.network_lost:
        found.append(Condition(type=NETWORK_LOST, status=True, message=seen.network_lost))
    if held:
        found.append(Condition(type=HELD, status=True, message=held))
    if seen.attempt and not runs:
        found.append(
            Condition(type="Retrying", status=True, reason=seen.reason, attempt=seen.attempt)
        )
    return tuple(found)
