"""Defines the port that plugs and unplugs devices of running guests."""

from collections.abc import Sequence
from typing import Protocol


class LiveDevices(Protocol):
    """The devices of running guests. Methods raise VirtbusError as `Hypervisor` does."""

    async def live_xml(self, uid: str) -> str | None:
        """Return the XML of a running guest; None if no guest runs.

        A device leaves the XML once QEMU reports that the guest has released it.
        """

    async def attach(self, uid: str, devices: Sequence[str]) -> None:
        """Plug devices, given as XML, into the guest, if it runs."""

    async def detach(self, uid: str, alias: str) -> None:
        """Ask the guest to release the device `alias`. Returns at once. Idempotent."""

    async def detach_unknown(self, uid: str, number: int) -> None:
        """Ask the guest to release NIC `number` of its start. libvirt does not know this NIC."""

    async def has_unknown(self, uid: str, number: int) -> bool:
        """Return True while the guest has NIC `number` of its start.

        Once the guest has released the NIC, this call also makes QEMU close the NIC's tap.
        """
