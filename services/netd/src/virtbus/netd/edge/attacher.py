"""The protocol of attachers. Each connects the interfaces of one kind of network to the host."""

from collections.abc import Sequence
from typing import Protocol

from virtbus.netd.core.attachment import Attachment, Nic
from virtbus.netd.core.used_nics import UsedNics
from virtbus.netd.edge.netlink import Netlink


class Attacher(Protocol):
    """Connects the interfaces of one kind. Each method blocks, and can be repeated."""

    def plan(self, nic: Nic, vm: Attachment, used: UsedNics) -> Nic:
        """Return the interface with its address, or with the conflist for its plugins.

        `used` has all other interfaces on the host. Nothing is made. Raises VirtbusError.
        """

    def prepare(self, host: Netlink, nics: Sequence[Nic]) -> None:
        """Ensure what a network's interfaces share on the host. Raises VirtbusError."""

    def attach(self, host: Netlink, uid: str, nics: Sequence[Nic], netns_fd: int) -> None:
        """Connect interfaces of one VM to the namespace `netns_fd`, after `prepare`."""

    def verify(self, nics: Sequence[Nic], *, mend: bool) -> list[str]:
        """Return a message for each fault on the host. With `mend`, repair instead."""

    def detach(self, left: Sequence[Nic]) -> None:
        """Remove the shared resources of the host that no interface of `left` needs.

        Host ends are not shared: the kernel removes them with the VM's namespace.
        """
