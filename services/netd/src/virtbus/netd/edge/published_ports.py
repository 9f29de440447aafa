"""Publishes ports of the host: one nftables table for all guests."""

import logging
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from virtbus.netd.core import redirected
from virtbus.netd.core.attachment import Attachment
from virtbus.netd.core.published import (
    Lead,
    Listener,
    has_ports_table,
    holder,
    leads_of,
    listeners,
    no_ports_table,
    no_such_address,
    port_taken,
    ports_table,
    refuse_tunnel_port,
    refuse_without_ipv6,
    taken_by,
)
from virtbus.netd.edge.host_bridges import HostBridges
from virtbus.netd.edge.netlink import NETLINK_NETFILTER, Netlink
from virtbus.schemas.errors import VirtbusError

log = logging.getLogger(__name__)

_TABLES = {"tcp": ("tcp", "tcp6"), "udp": ("udp", "udp6")}


class PublishedPorts:
    """The published ports of this host, by VM.

    All methods block. Their thread must be in the host's namespace.
    """

    def __init__(self, bridges: HostBridges) -> None:
        self._bridges = bridges
        self._leads: dict[str, tuple[Lead, ...]] = {}
        self._lock = threading.Lock()
        self._whole = False
        """True once the table has the ports of all adopted networks."""

    def claim(self, attachment: Attachment) -> None:
        """Publish exactly the ports of a VM. Check only new ports.

        Raises:
            VirtbusError: 409 `port_taken`: another VM, or a process, has a port; the message names
                it.
                409 `address_missing`: the host lacks the address of a published port.
                Also the errors of `refuse_tunnel_port` and `refuse_without_ipv6`.
        """
        with self._lock:
            refuse_tunnel_port(attachment)
            leads = leads_of(attachment)
            refuse_without_ipv6(attachment)
            known = self._leads.get(attachment.uid, ())
            if new := [lead for lead in leads if lead not in known]:
                self._check(attachment.uid, new)
            self._set(attachment.uid, leads)

    def adopt(self, attachment: Attachment) -> None:
        """Publish the ports of an existing network without a check.

        At netd's start, the earlier netd's table stays unchanged until `settle`.
        """
        with self._lock:
            if leads := leads_of(attachment):
                with self._keeping(attachment.uid, leads):
                    if self._whole or not self._stands():
                        self._apply()

    def settle(self) -> None:
        """Write the table once all networks of an earlier netd are adopted.

        The new table lacks the ports of networks that are gone. In the old table, such a port may
        lead to a new guest with the old guest's address.
        """
        with self._lock:
            if not self._whole and (self._leads or self._stands()):
                self._write()
            self._whole = True

    def drop(self, uid: str) -> None:
        """End the published ports of a VM, and the connections through them."""
        with self._lock:
            self._set(uid, ())

    def mend(self) -> None:
        """Write the table after netd's start, or if another program has removed it."""
        with self._lock:
            if self._leads and not (self._whole and self._stands()):
                self._write()

    def is_missing(self, uid: str) -> bool:
        with self._lock:
            return bool(self._leads.get(uid)) and not self._stands()

    def _set(self, uid: str, leads: tuple[Lead, ...]) -> None:
        before = self._leads.get(uid, ())
        with self._keeping(uid, leads):
            if leads != before or (leads and not self._stands()):
                self._write()
        _end_connections({lead.end for lead in before} - {lead.end for lead in leads})

    @contextmanager
    def _keeping(self, uid: str, leads: tuple[Lead, ...]) -> Iterator[None]:
        """Set the ports of a VM. Restore the former ports if the kernel refuses the new table.

        If the refused ports stayed, each later write for other VMs would fail, too.
        """
        before = self._leads.get(uid, ())
        self._keep(uid, leads)
        try:
            yield
        except (VirtbusError, OSError):
            self._keep(uid, before)
            raise

    def _keep(self, uid: str, leads: tuple[Lead, ...]) -> None:
        if leads:
            self._leads[uid] = leads
        else:
            self._leads.pop(uid, None)

    def _write(self) -> None:
        self._apply()
        self._whole = True

    def _apply(self) -> None:
        name = self._bridges.built_in.name
        leads = [lead for held in self._leads.values() for lead in held]
        with Netlink(NETLINK_NETFILTER) as filters:
            filters.do(ports_table(name, leads) if leads else no_ports_table(name))

    def _stands(self) -> bool:
        with Netlink(NETLINK_NETFILTER) as filters:
            return filters.ask(has_ports_table(self._bridges.built_in.name)) is not None

    def _check(self, uid: str, leads: Sequence[Lead]) -> None:
        addresses = self._bridges.addresses()
        for lead in leads:
            port = lead.port
            if port.host_address is not None and port.host_address not in addresses:
                raise no_such_address(port)
            if who := holder(port, self._leads, uid):
                raise port_taken(port, who)
            if (socket := taken_by(lead, _listening(port.protocol))) is not None:
                raise port_taken(port, _process(socket))


def _end_connections(ports: Collection[redirected.GuestPort]) -> None:
    """End the connections to guests' ports that are no longer published. An OSError is logged.

    The kernel redirects known connections without the rules. A client that keeps sending UDP from
    one port would thus reach the next guest with the same address.
    """
    if not ports:
        return
    try:
        with Netlink(NETLINK_NETFILTER) as filters:
            found = filters.dump(redirected.list_connections())
            filters.do(list(redirected.ended(found, ports)))
    except OSError as error:
        extra = {"code": "connections_left"}
        log.warning("connections to unpublished ports not ended: %s", error, extra=extra)


def _listening(protocol: str) -> list[Listener]:
    found: list[Listener] = []
    for name in _TABLES[protocol]:
        with suppress(FileNotFoundError):  # a host without IPv6
            found += listeners(protocol, Path("/proc/thread-self/net", name).read_text())
    return found


def _process(socket: Listener) -> str:
    """Return the process of a socket in words. Slow: it reads all of /proc."""
    wanted = f"socket:[{socket.inode}]"
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and wanted in _links(folder / "fd"):
            with suppress(OSError):
                return f"the process {(folder / 'comm').read_text().strip()} ({folder.name})"
    return "another process of the host"


def _links(folder: Path) -> Iterator[str]:
    with suppress(OSError):
        for one in folder.iterdir():
            with suppress(OSError):
                yield str(one.readlink())
