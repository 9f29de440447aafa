"""What a comparison of a VM's network with the host found."""

from dataclasses import dataclass

from virtbus.netd.core.attachment import Attachment
from virtbus.schemas.errors import Code, ErrorBody, VirtbusError


@dataclass(frozen=True, slots=True)
class Finding:
    """One network that was not whole. `error` None: it is again."""

    attachment: Attachment
    message: str
    error: ErrorBody | None = None

    @property
    def reason(self) -> str:
        return self.error.reason if self.error is not None else "network_mended"

    @property
    def refusal(self) -> VirtbusError:
        """What who asks for the network now is told."""
        return VirtbusError(Code.CONFLICT, "network_lost", self.message)


def mended(attachment: Attachment, faults: list[str]) -> Finding:
    """Somebody took parts away, and they are back."""
    return Finding(attachment, f"somebody took parts of it away: {', '.join(faults)}; made anew")


def lost(attachment: Attachment, faults: list[str]) -> Finding:
    """A guest runs, and its emulator no longer holds a tap: only a new start gives it one."""
    what = ", ".join(faults) or "its emulator holds no tap any more"
    message = (
        f"the running guest is cut off: {what}; stop and start the VM to give it its network again"
    )
    return Finding(attachment, message, VirtbusError(Code.CONFLICT, "network_lost", message).body)
