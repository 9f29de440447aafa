"""What an agent tells of a VM beside its phase, and the conditions that follow from it."""

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
    """What the agent tells of the VM beside its phase."""

    reason: str = ""
    message: str = ""
    started_ns: int | None = None
    restarts: int = 0
    reboots: int = 0
    rebooted_ns: int | None = None
    boots_anew: bool = False
    """We heard of a reboot: what the console said before it is no sign of life."""
    last_end: GuestEnd | None = None
    mishap: Literal["", "panicked", "watchdog"] = ""
    """Why this run is about to end as if its emulator had crashed."""
    end_told: bool = False
    """An earlier agent told of the guest's end: to find it again is no news."""
    attempt: int = 0
    ready: str = ""
    ready_ns: int = 0
    domain_hash: str = ""
    accelerator: str = ""
    network_lost: str = ""
    """Why the running guest is cut off, in netd's words."""
    disk_waits: str = ""
    """Why the guest is paused, where its disk had no room."""


def conditions(
    seen: Seen, phase: Phase, *, held: str, anew: bool, paused: bool
) -> tuple[Condition, ...]:
    """The conditions of a VM.

    `paused` means that its record asks for that, `held` says why nothing is started or ended,
    `anew` that the spec changed in what a running domain cannot take over.
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
    """Who paused the guest, in KubeVirt's words."""
    if seen.disk_waits and not asked:
        return Condition(type=PAUSED, status=True, reason="PausedIOError", message=seen.disk_waits)
    why = "" if asked else "paused on its host, not by virtbus; `virtbus vm unpause` lets it go on"
    return Condition(type=PAUSED, status=True, reason="PausedByUser", message=why)
