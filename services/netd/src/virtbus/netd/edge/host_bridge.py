"""The built-in network's host side: one bridge, one nftables table, and `ip_forward`.

Made when the first VM needs it, removed with what was changed when the last one is gone.
"""

import json
import logging
import threading
from contextlib import suppress
from ipaddress import IPv4Interface
from pathlib import Path

from virtbus.netd.core import links, names
from virtbus.netd.core.host_table import host_table, no_host_table
from virtbus.netd.edge.namespaces import read_sysctl, write_sysctl
from virtbus.netd.edge.netlink import NETLINK_NETFILTER, Netlink
from virtbus.schemas.errors import Code, VirtbusError

log = logging.getLogger(__name__)
_FORWARD = "net/ipv4/ip_forward"


class HostBridge:
    """Blocks, and works in the calling thread's namespace: the host's."""

    def __init__(self, name: str, gateway: IPv4Interface, memo: Path) -> None:
        """`memo` is the file that keeps what `ip_forward` was."""
        self.name = name
        self.gateway = gateway
        self._memo = memo
        self._lock = threading.Lock()
        self._index = 0
        self.times_made = 0

    def ensure(self, host: Netlink) -> int:
        """The index of the bridge, which stands with its address, rules and forwarding.

        Raises:
            VirtbusError: 409 when the subnet belongs to another link of the host.
        """
        with self._lock:
            reply = host.ask(links.get_link(self.name))
            link = links.read_link(reply) if reply is not None else None
            if link is None or link.index != self._index or not link.up:
                self._index = self._make(host)
                self.times_made += 1
            return self._index

    def _make(self, host: Netlink) -> int:
        self._check_subnet(host)
        self._remember_forwarding()
        mac = names.bridge_mac(str(self.gateway.network))
        host.do([links.new_bridge(self.name, mac=mac), links.no_ipv6(self.name)])
        reply = host.ask(links.get_link(self.name))
        link = links.read_link(reply) if reply is not None else None
        if link is None:
            raise VirtbusError(
                Code.INTERNAL, "bridge_lost", f"{self.name} vanished while it was made; try again"
            )
        host.do([links.set_link(self.name, up=True), links.add_address(link.index, self.gateway)])
        with Netlink(NETLINK_NETFILTER) as filters:
            filters.do(host_table(self.name, self.gateway))
        write_sysctl(_FORWARD, "1")
        log.info("host bridge is up", extra={"code": "bridge_up", "bridge": self.name})
        return link.index

    def _check_subnet(self, host: Netlink) -> None:
        for reply in host.dump(links.all_addresses()):
            found = links.read_address(reply)
            if found is None or not found[1].network.overlaps(self.gateway.network):
                continue
            if found[1] != self.gateway:
                raise VirtbusError(
                    Code.CONFLICT,
                    "subnet_taken",
                    f"the host has the address {found[1]} in {self.gateway.network} already; "
                    "set another `subnet` for netd",
                )

    def _remember_forwarding(self) -> None:
        if self._memo.exists():
            return
        part = self._memo.with_suffix(".part")
        part.write_text(json.dumps({"ip_forward": read_sysctl(_FORWARD)}))
        part.replace(self._memo)

    def remove(self) -> None:
        """Take away bridge, table and forwarding; nothing is done where nothing was made."""
        with self._lock:
            self._index = 0
            with Netlink(NETLINK_NETFILTER) as filters, suppress(FileNotFoundError):
                filters.do(no_host_table())
            with Netlink() as host:
                host.do([links.delete_link(self.name)])
            if self._memo.exists():
                before = json.loads(self._memo.read_text())
                write_sysctl(_FORWARD, str(before["ip_forward"]))
                self._memo.unlink()
                log.info("host bridge is gone", extra={"code": "bridge_gone"})

    @property
    def made(self) -> bool:
        """True while something of the host side may stand."""
        return self._memo.exists()
