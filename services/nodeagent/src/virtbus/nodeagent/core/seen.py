"""The observed state of a VM other than its phase, and the resulting conditions."""

from dataclasses import dataclass
from typing import Literal

from virtbus.nodeagent.core.lifecycle import Phase
from virtbus.schemas.guest_end import GuestEnd
from virtbus.schemas.vm import Condition

READY, RESTART_REQUIRED, HELD = "Ready", "RestartRequired", "Held"
NETWORK_LOST = "NetworkLost"
PAUSED = "Paused"


@dataclass
class Seen:
    """The observed state of a VM other than its phase."""

    reason: str = ""
    message: str = ""
    started_ns: int | None = None
    restarts: int = 0
    reboots: int = 0
    rebooted_ns: int | None = None
    boots_anew: bool = False
    """A reboot was reported: earlier console output is no sign of readiness."""
    last_end: GuestEnd | None = None
    mishap: Literal["", "panicked", "watchdog"] = ""
    """The failure after which this run's end counts as a crash."""
    end_told: bool = False
    """An earlier agent reported the guest's end: finding it again emits no event."""
    attempt: int = 0
    ready: str = ""
    ready_ns: int = 0
    domain_hash: str = ""
    accelerator: str = ""
    network_lost: str = ""
    """The reason why the running guest has no network, from netd."""
    disk_waits: str = ""
    """The reason why the guest is paused, if its disk was full."""


def conditions(
    seen: Seen, phase: Phase, *, held: str, anew: bool, paused: bool
) -> tuple[Condition, ...]:
    """Return the conditions of a VM.

    `paused`: the record asks for a pause. `held`: the reason for the hold, or empty. `anew`: the
    spec has changes that need a restart.
    """
    runs = phase is Phase.RUNNING
    found = [
        Condition(
            type=READY,
            status=bool(seen.ready) and runs,
            reason=(seen.ready or "Booting") if runs else "NotRunning",
            since_ns=seen.ready_ns,
        )
    ]
    if phase is Phase.PAUSED:
        found.append(_paused(seen, asked=paused))
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


def _paused(seen: Seen, *, asked: bool) -> Condition:
    """Return the condition that names the cause of the pause, in KubeVirt's words."""
    if seen.disk_waits and not asked:
        return Condition(type=PAUSED, status=True, reason="PausedIOError", message=seen.disk_waits)
    why = "" if asked else "paused on its host, not by virtbus; `virtbus vm unpause` resumes it"
    return Condition(type=PAUSED, status=True, reason="PausedByUser", message=why)
