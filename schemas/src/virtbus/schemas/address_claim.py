"""Addresses that are claimed on the bus for the interfaces of VMs (ADR 0064)."""

from virtbus.schemas.ids import Uid
from virtbus.schemas.model import SCHEMA_VERSION, LenientModel


class ClaimedAddresses(LenientModel):
    """The addresses of an interface that are claimed on the bus for its VM (ADR 0064)."""

    network: Uid
    addresses: tuple[str, ...] = ()
    """IPv4 and IPv6 addresses without a prefix, those of the spec first."""
    mac: str = ""
    """The MAC, if the spec has one."""


class AddressClaim(LenientModel):
    """`$KV.vm._addr.<network>.<address>`: the VM that has the address.

    The field `vm` is not named `uid`, so that an older controller does not take the value for a
    name claim.
    """

    schema_version: int = SCHEMA_VERSION
    vm: Uid

    @property
    def uid(self) -> str:
        """Return the uid of the VM."""
        return self.vm
