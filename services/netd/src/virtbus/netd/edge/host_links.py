"""Lists the links of the host, to find links that CNI plugins leave behind."""

from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from virtbus.netd.core import names
from virtbus.netd.edge import links
from virtbus.netd.edge.namespaces import opened
from virtbus.netd.edge.netlink import Netlink

_DEVICES = Path("/proc/thread-self/net/dev")
_LASTING = frozenset({"bridge"})
"""Kinds of links that a plugin makes once per network, for all its guests."""


def link_names() -> frozenset[str]:
    """Return the names of all links in the thread's namespace, read from /proc.

    A list by netlink takes 2 s on a host with 1,000 namespaces.
    """
    rows = _DEVICES.read_text().splitlines()[2:]
    return frozenset(row.partition(":")[0].strip() for row in rows)


def appeared(known: Collection[str], netns: Path) -> list[str]:
    """Return the links that are not in `known`, without bridges and links of virtbus.

    The result also excludes a link whose peer is in the namespace `netns`, because the link ends
    with that namespace.
    """
    new = sorted(link_names().difference(known))
    with Netlink() as host:
        return [name for name in new if not names.is_own_link(name) and _stays(host, name, netns)]


def _stays(host: Netlink, name: str, netns: Path) -> bool:
    link = links.describe(host, name)
    if link is None or link.kind in _LASTING or link.alias.startswith(names.OWNER_PREFIX):
        return False
    inside = None
    with suppress(FileNotFoundError), opened(netns) as fd:
        inside = links.namespace_id(host, fd)
    return inside is None or link.peer_namespace != inside
