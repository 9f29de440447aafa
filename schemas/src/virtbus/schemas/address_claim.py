"""Addresses that are claimed on the bus for the interfaces of VMs (ADR 0064)."""

from virtbus.schemas.ids import Uid
from virtbus.schemas.model import SCHEMA_VERSION, LenientModel


class ClaimedAddresses(LenientModel):
    """The addresses of an interface that are claimed on the bus for its VM (ADR 0064)."""

    network: Uid
    addresses: tuple[str, ...] = ()
    """IPv4 and IPv6 addresses without a prefix length. The addresses of the spec come first."""
    mac: str = ""
    """The MAC, if the spec has one."""


class AddressClaim(LenientModel):
    """`$KV.vm._addr.<network>.<address>`: the VM that has the address.

    The field is named `vm`, because an older controller takes a value with `uid` for a name claim.
    """

    schema_version: int = SCHEMA_VERSION
    vm: Uid

    @property
    def uid(self) -> str:
        return self.vm
