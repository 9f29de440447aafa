"""Derives the names of the links that a VM's interfaces have on the host, for several services."""

import hashlib

NUMBERS = "0123456789abcdefghijklmnopqrstuv"
"""The characters for the numbers 0 to 31 of interfaces."""


def host_link(uid: str, index: int) -> str:
    """Return the name of the link that is the host's end of the interface with number `index`.

    A link's name has at most 15 bytes, so it contains 48 bits of a hash of the uid. The link's
    alias is the full uid, so netd never adopts the link of another VM with the same hash (NET-01).
    """
    return f"vb{hashlib.sha256(uid.encode()).hexdigest()[:12]}{NUMBERS[index]}"
