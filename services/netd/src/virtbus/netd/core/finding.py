"""Findings: the results of comparing a VM's network with the host."""

from dataclasses import dataclass

from virtbus.netd.core.attachment import Attachment
from virtbus.schemas.errors import Code, ErrorBody, VirtbusError


@dataclass(frozen=True, slots=True)
class NetworkFinding:
    """A network that was incomplete. If `error` is None, the guest continues to use the network."""

    attachment: Attachment
    message: str
    error: ErrorBody | None = None
    incomplete: bool = False
    """True if links or rules are still missing, because netd cannot make them now."""

    @property
    def reason(self) -> str:
        if self.error is not None:
            return self.error.reason
        return "network_incomplete" if self.incomplete else "network_mended"

    @property
    def refusal(self) -> VirtbusError:
        return VirtbusError(Code.CONFLICT, "network_lost", self.message)


def repaired(attachment: Attachment, faults: list[str], left: list[str]) -> NetworkFinding:
    """Return the finding for a repaired network.

    `faults` were missing before the repair; `left` are still missing after it.
    """
    if left:
        message = (
            f"parts of it are missing, and netd cannot make them: {', '.join(left)}; the log of "
            "virtbus-netd and `virtbus doctor` name the cause"
        )
        return NetworkFinding(attachment, message, incomplete=True)
    return NetworkFinding(
        attachment, f"somebody removed parts of it: {', '.join(faults)}; they were made again"
    )


def unbuilt(attachment: Attachment, faults: list[str]) -> NetworkFinding:
    """Return the finding for an irreparable network that no running guest has."""
    what = ", ".join(faults)
    message = f"parts of it are missing: {what}; the VM's next start makes the network again"
    return NetworkFinding(attachment, message, incomplete=True)


def lost(attachment: Attachment, faults: list[str]) -> NetworkFinding:
    """Return the finding for a running guest without its tap. Only a new start gives it a tap."""
    what = ", ".join(faults) or "its emulator holds no tap any more"
    message = (
        f"the running guest is cut off: {what}; stop and start the VM to give it its network again"
    )
    return NetworkFinding(
        attachment, message, VirtbusError(Code.CONFLICT, "network_lost", message).body
    )
