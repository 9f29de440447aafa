"""Declares findings: the results of comparing a VM's network with the host."""

from dataclasses import dataclass

from virtbus.netd.core.attachment import Attachment
from virtbus.schemas.errors import Code, ErrorBody, VirtbusError


@dataclass(frozen=True, slots=True)
class NetworkFinding:
    """One network that was incomplete. If `error` is None, it was repaired."""

    attachment: Attachment
    message: str
    error: ErrorBody | None = None

    @property
    def reason(self) -> str:
        return self.error.reason if self.error is not None else "network_mended"

    @property
    def refusal(self) -> VirtbusError:
        """Return the error for requests of this network."""
        return VirtbusError(Code.CONFLICT, "network_lost", self.message)


def mended(attachment: Attachment, faults: list[str]) -> NetworkFinding:
    """Return the finding for parts that somebody removed, and that were restored."""
    return NetworkFinding(
        attachment, f"somebody removed parts of it: {', '.join(faults)}; they were made again"
    )


def lost(attachment: Attachment, faults: list[str]) -> NetworkFinding:
    """Return the finding for a running guest without its tap, which only a new start gives it."""
    what = ", ".join(faults) or "its emulator holds no tap any more"
    message = (
        f"the running guest is cut off: {what}; stop and start the VM to give it its network again"
    )
    return NetworkFinding(
        attachment, message, VirtbusError(Code.CONFLICT, "network_lost", message).body
    )
