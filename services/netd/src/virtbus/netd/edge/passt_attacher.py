"""Connects interfaces whose binding is passt: on the network, passt takes the guest's place.

passt runs in its own namespace, which has the guest's addresses. The attacher of the network's kind
connects passt's namespace to the host. A relay copies frames between passt and the tap `eth` in the
VM's namespace. Other bindings have a veth end as `eth`, so all between `eth` and the guest is equal
for all bindings (ADR 0082).
"""

import functools
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from ipaddress import ip_interface
from pathlib import Path

from virtbus.netd.core import link_addresses
from virtbus.netd.core.attachment import Attachment, Nic, NicKind
from virtbus.netd.core.ipv6_frame import link_local_of
from virtbus.netd.core.names import mac_bytes
from virtbus.netd.core.passt import options, process_name
from virtbus.netd.core.routes import default_routes, put_route
from virtbus.netd.core.used_nics import UsedNics
from virtbus.netd.edge import links, passt_processes, taps
from virtbus.netd.edge.attacher import Attacher
from virtbus.netd.edge.namespaces import entered
from virtbus.netd.edge.netlink import Netlink
from virtbus.schemas.errors import Code, Detail, VirtbusError
from virtbus.schemas.nic import NicBinding

_CAPABILITIES = 1 << 5 | 1 << 6 | 1 << 7
"""CAP_KILL, CAP_SETGID and CAP_SETUID (`linux/capability.h`)."""
Started = Callable[[str, int], None]


class PasstAttacher:
    """Implements `attacher.Attacher`, on networks whose addresses virtbus assigns."""

    def __init__(self, kinds: Mapping[NicKind, Attacher], program: Path) -> None:
        self._kinds = kinds
        self._program = program
        self._seen: set[str] = set()
        """The process names of interfaces whose processes `started` has received."""
        self.started: Started = lambda _uid, process: passt_processes.forget(process)
        """Called with a VM's uid and a pidfd of its relay or passt; closes the pidfd."""

    @property
    def bindings(self) -> tuple[str, ...]:
        offered = os.access(self._program, os.X_OK) and _may_become_nobody()
        return (NicBinding.PASST.value,) if offered else ()

    def plan(self, nic: Nic, vm: Attachment, used: UsedNics) -> Nic:
        """Return the interface with its addresses.

        Raises:
            VirtbusError: 422 `passt_missing` if this host offers no passt, or an error of the
                attacher of the network's kind.
        """
        if not self.bindings:
            message = (
                f"this host has no {self._program}, or the unit of virtbus-netd does not allow it; "
                "install Debian's package passt, and the unit's passt.conf (docs/howto/nics.md)"
            )
            path = f"{nic.path}.binding"
            detail = Detail(path=path, message=message)
            raise VirtbusError(Code.UNSUPPORTED, "passt_missing", message, details=(detail,))
        return self._kinds[nic.kind].plan(nic, vm, used)

    def prepare(self, host: Netlink, nics: Sequence[Nic]) -> None:
        """Raises VirtbusError."""
        for nic in nics:
            self._kinds[nic.kind].prepare(host, (nic,))

    def attach(self, host: Netlink, uid: str, nics: Sequence[Nic], netns_fd: int) -> None:
        """Start passt for interfaces that lack it. The thread must be in the VM's namespace."""
        for nic in nics:
            if links.find(host, nic.host_link) is None or not self._adopted(uid, nic):
                self._start(host, uid, nic, netns_fd)

    def _adopted(self, uid: str, nic: Nic) -> bool:
        """Return True if passt serves the interface. Pass its processes to `started` once.

        A relay without passt ends soon: its netd was killed before passt started.
        """
        with Netlink() as inside:
            if links.find(inside, nic.eth) is None:
                return False
        name = process_name(uid, nic.index)
        if name in self._seen:
            return True
        there = passt_processes.found(name)
        served = name in there.values() and len(there) > 1
        for process in there:
            if served:
                self.started(uid, process)
            else:
                passt_processes.forget(process)
        if served:
            self._seen.add(name)
        return served

    def _start(self, host: Netlink, uid: str, nic: Nic, netns_fd: int) -> None:
        name = process_name(uid, nic.index)
        self.end(uid, (nic.index,))
        # the kernel frees the ended passt's namespace, with the veth pair, only after a moment
        host.do([links.delete_link(nic.host_link)])
        tap = taps.open_tap(nic.eth, header=False)  # the kernel removes the tap when the relay ends
        try:
            with Netlink() as inside:
                inside.do([links.set_link(nic.eth, mtu=nic.mtu)])
            words = [name, nic.mac, str(self._program), *options(nic, uid)]
            with passt_processes.begun(words, tap) as relay:
                try:
                    self._kinds[nic.kind].attach(host, uid, (nic,), relay.namespace)
                    with entered(relay.namespace, netns_fd):
                        _address(nic)
                finally:
                    os.close(relay.namespace)
                relay.finish()
        finally:
            os.close(tap)
        self._seen.add(name)
        self.started(uid, relay.process)

    def end(self, uid: str, indices: Collection[int]) -> None:
        """Raises VirtbusError 500 `passt_stays`."""
        for index in indices:
            name = process_name(uid, index)
            passt_processes.end(name)
            self._seen.discard(name)

    def lost(self, nics: Sequence[Nic]) -> list[str]:
        """Return a message for each interface whose passt has lost its link to the network."""
        bound = [nic for nic in nics if nic.binding is NicBinding.PASST]
        if not bound:
            return []
        with Netlink() as host:
            gone = [nic for nic in bound if links.find(host, nic.host_link) is None]
        return [f"{nic.host_link}, by which passt of {nic.eth} sends, is gone" for nic in gone]

    def verify(self, nics: Sequence[Nic], *, mend: bool) -> list[str]:
        return [one for nic in nics for one in self._kinds[nic.kind].verify((nic,), mend=mend)]

    def detach(self, left: Sequence[Nic]) -> None:
        """The attacher of each kind removes the unused host side."""


@functools.cache
def _may_become_nobody() -> bool:
    """Return True if this process may start and end programs of other users.

    Its capabilities never change.
    """
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    found = next(line for line in status.splitlines() if line.startswith("CapEff:"))
    return int(found.split()[1], 16) & _CAPABILITIES == _CAPABILITIES


def _address(nic: Nic) -> None:
    """Give the link in passt's namespace the guest's MAC, addresses and default routes.

    passt serves IPv6 only if the link has its link-local address when passt starts. The kernel may
    add this address a second after the link is up, so netd adds it earlier.
    """
    given = [ip_interface(one) for one in nic.addresses]
    if nic.addresses6:
        given.append(ip_interface(f"{link_local_of(mac_bytes(nic.mac))}/64"))
    with Netlink() as inside:
        inside.do([links.set_link("lo", up=True)])
        inside.do([links.set_link(nic.eth, mac=nic.mac, mtu=nic.mtu)])
        link = links.find(inside, nic.eth)
        if link is None:
            return
        inside.do([link_addresses.add_address(link.index, one) for one in given])
        inside.do([links.set_link(nic.eth, up=True)])
        routes = default_routes((nic.gateway, nic.gateway6), link.index)
        inside.do([put_route(one) for one in routes])
