"""Refuses networks that no node of the fleet can have (ADR 0055)."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from virtbus.schemas.cni_config import plugins_in
from virtbus.schemas.errors import Code, Detail, VirtbusError
from virtbus.schemas.network_object import NetworkKind, NetworkSpec
from virtbus.schemas.node import NodeRecord
from virtbus.schemas.overlay import ENCAPSULATION_BYTES

_NODES_SHOWN = 8


def refuse_impossible(spec: NetworkSpec, nodes: Mapping[str, NodeRecord]) -> None:
    """Raise 422 if no node of the fleet can have the network.

    Also raise 422 if a subnet is for an unknown node, or a node cannot carry the MTU. If no node is
    known, every network is accepted.
    """
    if not nodes:
        return
    found: list[Detail] = []
    hint = f"known nodes: {', '.join(sorted(nodes)[:_NODES_SHOWN])}"
    for field, subnets in (("subnets", spec.subnets), ("subnets6", spec.subnets6)):
        found += [
            Detail(path=f"spec.{field}.{node}", message="is no node", hint=hint)
            for node in sorted(set(subnets) - set(nodes))
        ]
    if spec.conflist and not any(spec.conflist in node.networks for node in nodes.values()):
        hint = "add the conflist to cni_conf_dir of a node first"
        found.append(Detail(path="spec.conflist", message="no node has it", hint=hint))
    if spec.kind is NetworkKind.OVERLAY and not any(node.tunnel for node in nodes.values()):
        hint = "set overlay_address of a node's netd, or wait until one has reported"
        message = "no node has an address for tunnels"
        found.append(Detail(path="spec.kind", message=message, hint=hint))
    if spec.link and not any(node.links.get(spec.link) == spec.kind for node in nodes.values()):
        hint = "add it to the setting links_allowed of a node's netd; it must exist there"
        message = f"no node has and allows a {spec.kind} {spec.link}"
        found.append(Detail(path="spec.link", message=message, hint=hint))
    if spec.config:
        found += _forbidden(spec.config, nodes.values())
    found += _too_large(spec, nodes.values())
    _refuse(found)


def refuse_mtu(spec: NetworkSpec, nodes: Mapping[str, NodeRecord]) -> None:
    """Raise 422 if a host's own network cannot carry the MTU of a network."""
    _refuse(list(_too_large(spec, nodes.values())))


def _refuse(found: Sequence[Detail]) -> None:
    if found:
        message = f"{found[0].path}: {found[0].message}; {found[0].hint}"
        raise VirtbusError(Code.UNSUPPORTED, "network_impossible", message, details=tuple(found))


def _too_large(spec: NetworkSpec, nodes: Iterable[NodeRecord]) -> Iterator[Detail]:
    """Yield a problem if the MTU exceeds the lowest limit of the hosts."""
    carried = [(mtu, node.node) for node in nodes if (mtu := _carried(spec, node)) is not None]
    if spec.mtu and carried and spec.mtu > min(carried)[0]:
        mtu, node = min(carried)
        what = spec.link or "the tunnel"
        hint = f"choose {mtu} or less, or leave it out"
        yield Detail(path="spec.mtu", message=f"{what} of {node} carries {mtu} bytes", hint=hint)


def _carried(spec: NetworkSpec, node: NodeRecord) -> int | None:
    """Return the MTU that a node's own network leaves to guests; None if unknown."""
    if spec.kind is NetworkKind.OVERLAY:
        return None if node.tunnel is None else node.tunnel.mtu - ENCAPSULATION_BYTES
    has_link = spec.link is not None and node.links.get(spec.link) == spec.kind
    return node.link_mtus.get(spec.link or "") if has_link else None


def _forbidden(config: str, nodes: Iterable[NodeRecord]) -> list[Detail]:
    """Return the forbidden plugins of the node that allows the most of them."""
    wanted = plugins_in(config)
    refused = (
        (node.node, [(path, plugin) for path, plugin in wanted if plugin not in node.cni_plugins])
        for node in nodes
    )
    name, lacking = min(refused, key=lambda one: len(one[1]))
    hint = "an operator adds it to the setting cni_plugins_allowed of a node's netd"
    message = f"no node allows all plugins; {name} does not allow {{}} here"
    return [
        Detail(path=f"spec.config.{path}", message=message.format(plugin), hint=hint)
        for path, plugin in lacking
    ]
