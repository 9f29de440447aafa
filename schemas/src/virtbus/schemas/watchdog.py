"""A guest's watchdog device, and its action if the guest stops resetting it (as in KubeVirt)."""

from typing import Literal

from virtbus.schemas.model import StrictModel


class I6300esb(StrictModel):
    """Intel's 6300ESB, on PCI.

    `action` ends the guest (poweroff), resets it, or presses its power button (shutdown).
    """

    action: Literal["poweroff", "reset", "shutdown"] = "reset"


class Watchdog(StrictModel):
    """A watchdog, which counts once the guest has opened it (Linux: /dev/watchdog, i6300esb)."""

    i6300esb: I6300esb = I6300esb.model_construct()
