"""Derives the peers of overlay networks: hosts with guests of a network, and these guests."""

from collections.abc import Iterable, Iterator, Mapping

from virtbus.controller.core.vm_keys import StoredVm
from virtbus.schemas.ids import UNPLACED
from virtbus.schemas.network import guest_mac
from virtbus.schemas.network_object import NetworkKind
from virtbus.schemas.node import NodeRecord
from virtbus.schemas.overlay import MEMBERS_MAX, OverlayMember, OverlayPeer
from virtbus.schemas.subjects import overlay_peer
from virtbus.schemas.vm import VmRecord

Hosts = dict[str, list[OverlayMember]]
"""The guests of one network, by node."""


def peers_wanted(
    vms: Iterable[StoredVm], nodes: Mapping[str, NodeRecord], known: Mapping[str, OverlayPeer]
) -> dict[str, OverlayPeer]:
    """Return the wanted peers by key.

    A host gets a peer for each other host with guests of the same network. `known` has the stored
    peers. If a host reports no tunnel address at present, the address of its stored peers is used.
    """
    ends = {name: one.tunnel.address for name, one in nodes.items() if one.tunnel is not None}
    for last in known.values():
        ends.setdefault(last.peer, last.address)
    wanted = {}
    for network, hosts in _by_network(vms).items():
        for peer, members in hosts.items():
            if peer not in ends:
                continue
            shown = tuple(sorted(members, key=lambda one: one.mac)[:MEMBERS_MAX])
            for node in hosts.keys() - {peer}:
                key = overlay_peer(node, network, peer)
                wanted[key] = OverlayPeer(
                    node=node, network=network, peer=peer, address=ends[peer], members=shown
                )
    return wanted


def _by_network(vms: Iterable[StoredVm]) -> dict[str, Hosts]:
    found: dict[str, Hosts] = {}
    for held in vms:
        record = held.record
        if record.node == UNPLACED or not record.network_targets:
            continue
        for network, member in _members(record):
            found.setdefault(network, {}).setdefault(record.node, []).append(member)
    return found


def _members(record: VmRecord) -> Iterator[tuple[str, OverlayMember]]:
    """Yield the interfaces of a VM on overlay networks, each with the uid of its network."""
    networks = {one.name: one.network for one in record.spec.networks}
    for nic in record.spec.domain.devices.interfaces:
        target = record.network_targets.get(networks.get(nic.name, ""))
        if target is None or target.spec.kind is not NetworkKind.OVERLAY:
            continue
        claims = record.address_claims.get(nic.name)
        addresses = claims.addresses if claims is not None else ()
        mac = nic.mac_address or guest_mac(record.uid, nic.name)
        yield target.uid, OverlayMember(mac=mac, addresses=addresses)
