"""Names and MACs of links and namespaces on the host, most of them derived from a uid."""

import hashlib
import re

from virtbus.schemas.nic_names import NUMBERS
from virtbus.schemas.nic_names import host_link as host_link

_NETNS = re.compile(r"^vb-([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})$")
_HOST_LINK = re.compile(r"^vb[0-9a-f]{12}[0-9a-v]$")
_OWN_LINK = re.compile(r"^(vb|vt|vbn|vbx)[0-9a-f]{12}[0-9a-v]?$")

OWNER_PREFIX = "virtbus:"
NETWORK_BRIDGES = "vbn"
"""The prefix of the names of network objects' bridges."""
_MAX_ALIAS_BYTES = 254
"""Maximum length of a link's alias. The kernel accepts 255 bytes, including the NUL that pyroute2
appends."""


def owner_mark(state_dir: str) -> str:
    """Return the alias of netd's links, with its state folder or, if too long, a hash of it."""
    mark = f"{OWNER_PREFIX}{state_dir}"
    if len(mark.encode()) <= _MAX_ALIAS_BYTES:
        return mark
    return f"{OWNER_PREFIX}sha256-{hashlib.sha256(state_dir.encode()).hexdigest()}"


def netns(uid: str) -> str:
    """Return the name of a VM's network namespace."""
    return f"vb-{uid}"


def uid_of_netns(name: str) -> str | None:
    """Return the uid in the name of a VM's namespace; None for any other name."""
    match = _NETNS.match(name)
    return match.group(1) if match else None


def network_bridge(uid: str) -> str:
    """Return the name of the host's bridge for a network object, from the object's uid."""
    return f"{NETWORK_BRIDGES}{hashlib.sha256(uid.encode()).hexdigest()[:12]}"


def tunnel(uid: str) -> str:
    """Return the name of the VXLAN device of an overlay, from the network's uid."""
    return f"vbx{hashlib.sha256(uid.encode()).hexdigest()[:12]}"


def is_own_link(name: str) -> bool:
    """Return True if virtbus can have made a link of this name for a VM or a network object."""
    return _OWN_LINK.match(name) is not None


def is_host_link(name: str) -> bool:
    """Return True if `host_link` can have made this name."""
    return _HOST_LINK.match(name) is not None


def _hashed_mac(*parts: str) -> str:
    digest = hashlib.sha256("/".join(parts).encode()).digest()
    return "02:" + digest[:5].hex(":")


def lent_tap(uid: str, index: int) -> str:
    """Return the name that tap `index` has in the host's namespace, where libvirt opens the tap."""
    return f"vt{hashlib.sha256(uid.encode()).hexdigest()[:12]}{NUMBERS[index]}"


def wire_mac(uid: str, index: int) -> str:
    """Return the MAC of `eth<index>`; of the inner bridge, if `eth<index>` has the guest's MAC."""
    return _hashed_mac("wire", uid, str(index))


def outer_mac(uid: str, index: int) -> str:
    """Return the MAC of a host end on a bridge of the host.

    A bridge without a MAC of its own takes the lowest MAC of its ports. The returned MAC is too
    high for that.
    """
    return "fe:" + wire_mac(uid, index)[3:]


def bridge_mac(subnet: str) -> str:
    """Return the MAC of the host bridge. It never changes, because guests cache it (ARP)."""
    return _hashed_mac("bridge", subnet)


def mac_bytes(mac: str) -> bytes:
    """Return the six bytes of a MAC such as `aa:bb:…`."""
    return bytes.fromhex(mac.replace(":", ""))


def server_mac(uid: str, index: int) -> str:
    """Return the MAC from which netd sends its DHCP answers and router advertisements."""
    return _hashed_mac("dhcp", uid, str(index))
