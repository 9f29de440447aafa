"""Derives the names of the host's links of a VM's interfaces, which several services read."""

import hashlib

NUMBERS = "0123456789abcdefghijklmnopqrstuv"
"""The character for the number of an interface."""


def host_link(uid: str, index: int) -> str:
    """Return the name of the host's end of interface `index`.

    A link's name has at most 15 bytes, so it contains 48 bits of a hash of the uid. The link's
    alias is the whole uid, so netd never adopts the link of another VM with this hash (NET-01).
    """
    return f"vb{hashlib.sha256(uid.encode()).hexdigest()[:12]}{NUMBERS[index]}"
