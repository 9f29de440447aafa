"""Derives every name and MAC on the host from the uid."""

import hashlib
import re

_NETNS = re.compile(r"^vb-([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})$")
_HOST_LINK = re.compile(r"^vb[0-9a-f]{12}[0-7]$")

MAX_INTERFACES = 8

OWNER_PREFIX = "virtbus:"
_MAX_ALIAS_BYTES = 254
"""The kernel takes 255, and pyroute2 sends a NUL with them."""


def owner_mark(state_dir: str) -> str:
    """The alias of a host bridge: whose it is. A path too long for an alias becomes its hash."""
    mark = f"{OWNER_PREFIX}{state_dir}"
    if len(mark.encode()) <= _MAX_ALIAS_BYTES:
        return mark
    return f"{OWNER_PREFIX}sha256-{hashlib.sha256(state_dir.encode()).hexdigest()}"


def netns(uid: str) -> str:
    """The network namespace of a VM."""
    return f"vb-{uid}"


def uid_of_netns(name: str) -> str | None:
    """The uid in a namespace's name, None when the name is not one of ours."""
    match = _NETNS.match(name)
    return match.group(1) if match else None


def host_link(uid: str, index: int) -> str:
    """The host's end of interface `index`: 48 bits of hash in the 15 bytes a link name has.

    The link's alias holds the uid, so that a collision is seen, not adopted (NET-01).
    """
    return f"vb{hashlib.sha256(uid.encode()).hexdigest()[:12]}{index}"


def is_host_link(name: str) -> bool:
    """True for the form that `host_link` gives."""
    return _HOST_LINK.match(name) is not None


def eth(index: int) -> str:
    """The attachment inside the namespace."""
    return f"eth{index}"


def bridge(index: int) -> str:
    """The bridge that joins `eth` and `tap`."""
    return f"br{index}"


def tap(index: int) -> str:
    """The tap that QEMU opens."""
    return f"tap{index}"


def _hashed_mac(*parts: str) -> str:
    digest = hashlib.sha256("/".join(parts).encode()).digest()
    return "02:" + digest[:5].hex(":")


def guest_mac(uid: str, index: int) -> str:
    """The MAC of an interface whose spec names none: stable, locally administered."""
    return _hashed_mac("guest", uid, str(index))


def wire_mac(uid: str, index: int) -> str:
    """The MAC of `eth<index>`, never the guest's: two ports of one bridge must differ."""
    return _hashed_mac("wire", uid, str(index))


def bridge_mac(subnet: str) -> str:
    """The MAC of the host bridge, fixed: guests keep it in their ARP caches."""
    return _hashed_mac("bridge", subnet)


def mac_bytes(mac: str) -> bytes:
    """The six bytes of `aa:bb:…`."""
    return bytes.fromhex(mac.replace(":", ""))


def server_mac(uid: str, index: int) -> str:
    """The source of netd's DHCP answers when the guest's network has no gateway."""
    return _hashed_mac("dhcp", uid, str(index))
