"""Properties of a VM's network devices: models, bounds, limits of traffic."""

from enum import StrEnum
from ipaddress import ip_address
from typing import Annotated

from pydantic import AfterValidator, Field, StringConstraints

from virtbus.schemas.model import StrictModel
from virtbus.schemas.quantity import Bytes

NICS_MAX = 32
"""The most interfaces of a VM. Names of links on the host have one character for the number of an
interface."""
E1000_MAX = 8
"""The most interfaces of a VM with the models e1000 and e1000e. Each takes 4 KiB of the 64 KiB of
I/O ports."""
ADDRESSES_MAX = 8
ACPI_INDEX_MAX = 16 * 1024 - 1
"""QEMU's largest acpi-index."""
MTU_MIN, MTU_MAX = 576, 65_521
"""The smallest MTU of an IPv4 host (RFC 791), and the largest of a tap."""
QUEUES_MAX, QUEUES_IN_ALL = 16, 128
"""The most queues of an interface, and of a VM. vmwrapper takes a descriptor for each queue."""
RATE_MIN, RATE_MAX = 1000, 10**12
BURST_MIN, BURST_MAX = 1600, 2**31 - 1


def _static(text: str) -> str:
    try:
        address = ip_address(text)
    except ValueError:
        address = None
    wrong = address is None or "%" in text or address.is_multicast or address.is_unspecified
    if address is None or wrong or address.is_loopback or address.is_link_local:
        msg = "must be an IPv4 or IPv6 address of the network, without a prefix: 10.0.0.5"
        raise ValueError(msg)
    return str(address)


StaticAddress = Annotated[str, StringConstraints(max_length=45), AfterValidator(_static)]


class NicModel(StrEnum):
    """The device type by which the guest sees an interface."""

    VIRTIO = "virtio"
    E1000 = "e1000"
    E1000E = "e1000e"


class NicBinding(StrEnum):
    """The way from a guest to the network of an interface."""

    BRIDGE = "bridge"
    """The guest itself has an address of the network."""
    MASQUERADE = "masquerade"
    """The guest is behind NAT: the VM's namespace has the address of the network."""
    MACVTAP = "macvtap"
    """Like bridge, but permitted only on a network of the kind macvtap."""
    PASST = "passt"
    """The process passt connects the guest. The network gets packets of passt's sockets, and no
    frames of the guest."""


class NicLimit(StrictModel):
    """The rate of one direction. After a quiet time, `burst_bytes` may pass at once."""

    bytes_per_s: Bytes = Field(ge=RATE_MIN, le=RATE_MAX)
    burst_bytes: Bytes | None = Field(None, ge=BURST_MIN, le=BURST_MAX)
    """None means the bytes that pass in 10 ms at the rate, but at least 16 KiB."""


class NicLimits(StrictModel):
    """Limits of an interface's traffic. The Ethernet headers of frames count, too."""

    inbound: NicLimit | None = None
    """The limit of traffic to the guest."""
    outbound: NicLimit | None = None
    """The limit of traffic from the guest."""
