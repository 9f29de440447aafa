"""Lists the requests to the netd of a node."""

from virtbus.schemas import counters, group_rebuild, nic_work, node_rpc
from virtbus.schemas import network_path as path
from virtbus.schemas.channel import Channel
from virtbus.schemas.channel import of_node as _rpc

NETD_CALLS: tuple[Channel, ...] = (
    _rpc("netd", "ensure", node_rpc.Ensure, node_rpc.NetReady, "Make the network of a record."),
    _rpc("netd", "release", node_rpc.Release, node_rpc.ReleaseReply, "Remove a VM's network."),
    _rpc("netd", "nic", nic_work.NicWork, nic_work.NicDone, "A step of a NIC's hot-plug."),
    _rpc("netd", "inspect", node_rpc.Inspect, node_rpc.HeldResources, "Networks on the host."),
    _rpc("netd", "traffic", counters.CountersAsk, counters.Counters, "Counters of a VM's NICs."),
    _rpc("netd", "path", path.NetworkAsk, path.NetworkView, "The path of a VM's packets."),
    _rpc(
        "netd",
        "groups",
        group_rebuild.GroupsRead,
        group_rebuild.KnownGroups,
        "The host's copies of security groups.",
    ),
)
