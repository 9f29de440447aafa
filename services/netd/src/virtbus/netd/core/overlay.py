"""Entries of an overlay's tunnel, from its peers."""

from collections.abc import Iterable
from typing import NamedTuple

from virtbus.schemas.overlay import OverlayPeer


class Remote(NamedTuple):
    """The entries of a tunnel for guests on other hosts."""

    forwarding: dict[str, str]
    """The address of the host of each guest, by the guest's MAC."""
    neighbours: dict[str, str]
    """The MAC of each guest, by its address."""


def remote_of(peers: Iterable[OverlayPeer], own: Iterable[str] = ()) -> Remote:
    """Return the entries for the guests of all peers. `own` are MACs of guests of this host.

    A guest of this host gets no entries. During a move, two hosts may list one guest for a short
    time. The entries then name the last such host of `peers`.
    """
    here = set(own)
    forwarding: dict[str, str] = {}
    neighbours: dict[str, str] = {}
    for peer in peers:
        for member in peer.members:
            if member.mac not in here:
                forwarding[member.mac] = peer.address
                neighbours |= dict.fromkeys(member.addresses, member.mac)
    return Remote(forwarding, neighbours)


def changes(there: dict[str, str], wanted: dict[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return the entries to put, and the keys of the entries to delete."""
    put = {key: value for key, value in wanted.items() if there.get(key) != value}
    return put, sorted(there.keys() - wanted.keys())
