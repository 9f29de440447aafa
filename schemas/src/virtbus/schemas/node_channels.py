"""Lists the keys below a node's own id that hold no VM."""

from virtbus.schemas import hosts, node, overlay, security_group, subjects, vm
from virtbus.schemas.channel import Channel, Plane
from virtbus.schemas.channel import core_or_stored as _said

NODE_KEYS: tuple[Channel, ...] = (
    _said(
        subjects.join_nonce,
        Plane.RECORD,
        vm.JoinNonce,
        "admin → nodeagent",
        "The bus incarnation that the node joined.",
    ),
    _said(
        subjects.node_spec,
        Plane.RECORD,
        node.NodeSpec,
        "controller → controller, nodeagent",
        "Cordon, drain and fence of a node.",
    ),
    _said(
        subjects.node_host,
        Plane.RECORD,
        hosts.HostRecord,
        "controller → controller, nodeagent",
        "The node's host, and its approved labels and size.",
    ),
    _said(
        subjects.node_hosts,
        Plane.RECORD,
        node.HostAddresses,
        "controller → controller, netd",
        "Addresses of the fleet's hosts, which guests of the node may not reach.",
    ),
    _said(
        subjects.node_group,
        Plane.RECORD,
        security_group.NodeGroup,
        "controller → controller, netd",
        "A security group of VMs of the node, with the addresses of its peers.",
    ),
    _said(
        subjects.overlay_peer,
        Plane.RECORD,
        overlay.OverlayPeer,
        "controller → controller, netd",
        "The guests of an overlay on another host, for a node that has some, too.",
    ),
    _said(
        subjects.node_reserved,
        Plane.RECORD,
        node.Reserved,
        "controller → controller",
        "The sum of strict VMs on a node; changes in one batch with their records.",
    ),
)
