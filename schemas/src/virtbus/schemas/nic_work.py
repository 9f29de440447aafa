"""The steps by which an interface is plugged into a running guest, or unplugged (ADR 0057)."""

from typing import Literal

from virtbus.schemas.model import LenientModel


class NicWork(LenientModel):
    """`rpc.netd.nic`: one step of a hot-plug or unplug of the interface `name`; safe to repeat.

    `lend` makes the tap in the host's namespace, for libvirt. `join` moves the tap to the VM's
    network, once QEMU has opened it. `drop` removes the interface, once QEMU has released it.
    """

    uid: str
    epoch: int
    name: str
    do: Literal["lend", "join", "drop"]


class NicDone(LenientModel):
    """The interface after the step; after `lend`, `tap` is the device for libvirt."""

    uid: str
    name: str
    mac: str = ""
    mtu: int = 1500
    queues: int = 1
    tap: str = ""
