"""A guest's watchdog: its action if the guest no longer resets it (KubeVirt's)."""

from typing import Literal

from virtbus.schemas.model import StrictModel


class I6300esb(StrictModel):
    """Intel's 6300ESB, on PCI. `action`: end the guest, reset it, or press its power button."""

    action: Literal["poweroff", "reset", "shutdown"] = "reset"


class Watchdog(StrictModel):
    """A watchdog counts once the guest has opened it; in Linux `/dev/watchdog`, module i6300esb."""

    i6300esb: I6300esb = I6300esb()
