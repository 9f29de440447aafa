"""Implements the `DiskPlugs` port without a hypervisor, for simulated guests."""

from collections.abc import Mapping, Sequence

from virtbus.nodeagent.core.addresses import Addresses
from virtbus.nodeagent.core.plugs import GuestDevices


class NoPlugs:
    """The `DiskPlugs` port for simulated guests, which have no devices that could change."""

    async def devices(self, uid: str) -> GuestDevices | None:
        """Return None."""

    async def note(self, uid: str, addresses: Addresses, disks: Mapping[str, str]) -> None:
        """Do nothing."""

    async def attach(self, uid: str, devices: Sequence[str]) -> None:
        """Do nothing."""

    async def detach(self, uid: str, alias: str) -> None:
        """Do nothing."""

    async def close_left(self, uid: str) -> None:
        """Do nothing."""

    async def grow(self, uid: str, sizes: Mapping[str, int]) -> None:
        """Do nothing."""
