"""Returns this host's DNS servers, for guests and for the resolver's forwarded queries."""

from collections.abc import Sequence
from ipaddress import IPv4Address, ip_address
from pathlib import Path

from virtbus.netd.core.reach import Address

RESOLV_CONF = Path("/etc/resolv.conf")
MOST = 3


class HostServers:
    """The `fixed` servers of a setting; if there are none, the servers of a resolv.conf.

    The result includes servers on loopback. It excludes `gateway`, where the resolver listens and
    would get its own query.
    """

    def __init__(
        self, fixed: Sequence[Address], gateway: IPv4Address, path: Path = RESOLV_CONF
    ) -> None:
        self._fixed = tuple(each for each in fixed if each != gateway)
        self._gateway = gateway
        self._path = path
        self._changed_ns = -1
        self._found: tuple[Address, ...] = ()

    def addresses(self) -> tuple[Address, ...]:
        """Return at most 3 servers; none if the file is needed and unreadable."""
        if self._fixed:
            return self._fixed[:MOST]
        try:
            changed_ns = self._path.stat().st_mtime_ns
            if changed_ns != self._changed_ns:
                found = name_servers(self._path.read_text())
                self._found = tuple(each for each in found if each != self._gateway)[:MOST]
                self._changed_ns = changed_ns
        except (OSError, ValueError):
            return ()
        return self._found


def name_servers(text: str) -> tuple[Address, ...]:
    """Return the servers of a resolv.conf. Skip addresses with an interface (`fe80::1%eth0`)."""
    found = []
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 2 and words[0] == "nameserver" and "%" not in words[1]:
            try:
                found.append(ip_address(words[1]))
            except ValueError:
                continue
    return tuple(found)


def host_dns(path: Path) -> tuple[IPv4Address, ...]:
    """Return up to 3 IPv4 name servers of a resolv.conf, without those on loopback."""
    try:
        found = name_servers(path.read_text())
    except OSError:
        return ()
    usable = (one for one in found if isinstance(one, IPv4Address) and not one.is_loopback)
    return tuple(usable)[:MOST]
