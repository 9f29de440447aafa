"""Checks that a VM's namespace may use the networks of the VM, as nodes offer them."""

from collections.abc import Iterable, Iterator

from virtbus.schemas.errors import Code, Detail, VirtbusError
from virtbus.schemas.node import NodeRecord
from virtbus.schemas.vm import VmSpec

BUILT_IN, EVERY = "default", "*"


def check_networks(spec: VmSpec, namespace: str, nodes: Iterable[NodeRecord]) -> None:
    """Raise 403 if nodes offer a network of the spec, but no node opens it to the namespace."""
    wanted = [network.network for network in spec.networks]
    if all(name == BUILT_IN for name in wanted):
        return
    closed = set(_closed(set(wanted), namespace, list(nodes)))
    details = tuple(
        Detail(
            path=f"spec.networks[{index}].network",
            message=f"{name!r} is not open to the namespace {namespace!r}",
            hint="its operator opens it in the setting network_namespaces of the nodes' netd",
        )
        for index, name in enumerate(wanted)
        if name in closed
    )
    if details:
        message = f"{details[0].path}: {details[0].message}; {details[0].hint}"
        raise VirtbusError(Code.DENIED, "network_closed", message, details=details)


def _closed(names: set[str], namespace: str, nodes: list[NodeRecord]) -> Iterator[str]:
    for name in names - {BUILT_IN}:
        offers = [node for node in nodes if name in node.networks]
        opened = (set(node.network_namespaces.get(name, ())) for node in offers)
        if offers and not any(allowed & {namespace, EVERY} for allowed in opened):
            yield name
