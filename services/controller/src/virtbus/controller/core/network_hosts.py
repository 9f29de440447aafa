"""Refuses networks that no node of the fleet could have (ADR 0055)."""

from collections.abc import Iterable, Iterator, Mapping

from virtbus.schemas.cni_config import plugins_in
from virtbus.schemas.errors import Code, Detail, VirtbusError
from virtbus.schemas.network_object import NetworkKind, NetworkSpec
from virtbus.schemas.node import NodeRecord
from virtbus.schemas.overlay import ENCAPSULATION_BYTES

_NODES_SHOWN = 8


def refuse_impossible(spec: NetworkSpec, nodes: Mapping[str, NodeRecord]) -> None:
    """Raise 422 if no node of the fleet could have the network.

    A fleet without nodes refuses nothing.
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
    if spec.kind is NetworkKind.OVERLAY:
        found += _untunnelled(spec, nodes.values())
    if spec.link and not any(node.links.get(spec.link) == spec.kind for node in nodes.values()):
        hint = "add it to the setting links_allowed of a node's netd; it must exist there"
        message = f"no node has and allows a {spec.kind} {spec.link}"
        found.append(Detail(path="spec.link", message=message, hint=hint))
    if spec.config:
        found += _forbidden(spec.config, nodes.values())
    if found:
        message = f"{found[0].path}: {found[0].message}; {found[0].hint}"
        raise VirtbusError(Code.UNSUPPORTED, "network_impossible", message, details=tuple(found))


def _untunnelled(spec: NetworkSpec, nodes: Iterable[NodeRecord]) -> Iterator[Detail]:
    """Yield the reasons why the hosts of the fleet cannot carry an overlay."""
    mtus = [node.tunnel.mtu - ENCAPSULATION_BYTES for node in nodes if node.tunnel is not None]
    if not mtus:
        hint = "set overlay_address of a node's netd, or wait until one has reported"
        yield Detail(path="spec.kind", message="no node has an address for tunnels", hint=hint)
    elif spec.mtu and spec.mtu > min(mtus):
        hint = f"choose {min(mtus)} or less, or leave it out"
        message = f"a host's tunnels carry {min(mtus)} bytes at most"
        yield Detail(path="spec.mtu", message=message, hint=hint)


def _forbidden(config: str, nodes: Iterable[NodeRecord]) -> list[Detail]:
    """Return the plugins that the most permissive node does not allow."""
    wanted = plugins_in(config)
    refused = (
        [(path, plugin) for path, plugin in wanted if plugin not in node.cni_plugins]
        for node in nodes
    )
    hint = "an operator adds it to the setting cni_plugins_allowed of a node's netd"
    return [
        Detail(path=f"spec.config.{path}", message=f"no node allows {plugin} here", hint=hint)
        for path, plugin in min(refused, key=len)
    ]
