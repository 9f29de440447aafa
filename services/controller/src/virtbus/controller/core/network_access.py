"""Checks that a VM's namespace may use the networks of the VM, as nodes offer them."""

from collections.abc import Iterable, Iterator, Mapping

from virtbus.controller.core.network_demand import NO_TARGETS, Targets
from virtbus.schemas.errors import Code, Detail, VirtbusError
from virtbus.schemas.network_object import BUILT_IN
from virtbus.schemas.node import NodeRecord
from virtbus.schemas.vm import VmSpec

EVERY = "*"


def check_networks(
    spec: VmSpec,
    namespace: str,
    nodes: Iterable[NodeRecord],
    targets: Targets = NO_TARGETS,
    *,
    complete: bool = False,
) -> None:
    """Refuse networks that no node offers, or that nodes offer to other namespaces only.

    `complete` is True if all nodes are known, so that an unknown network is refused.

    Raises:
        VirtbusError: 404 `network_unknown`, 403 `network_closed`, with the fields.
    """
    wanted = {
        f"spec.networks[{index}].network": _offered(network.network, targets)
        for index, network in enumerate(spec.networks)
    }
    if all(name in {BUILT_IN, ""} for name in wanted.values()):
        return
    there = list(nodes)
    if complete and there:
        _refuse_unknown(wanted, there)
    closed = set(_closed(set(wanted.values()), namespace, there))
    details = tuple(
        Detail(
            path=path,
            message=f"{name!r} is not open to the namespace {namespace!r}",
            hint="its operator opens it in the setting network_namespaces of the nodes' netd",
        )
        for path, name in wanted.items()
        if name in closed
    )
    if details:
        message = f"{details[0].path}: {details[0].message}; {details[0].hint}"
        raise VirtbusError(Code.DENIED, "network_closed", message, details=details)


def _offered(name: str, targets: Targets) -> str:
    """Return the network that a node itself has to offer; empty if the object needs none."""
    target = targets.get(name)
    return name if target is None else target.spec.conflist or ""


def _refuse_unknown(wanted: Mapping[str, str], nodes: list[NodeRecord]) -> None:
    offered = {BUILT_IN, ""}.union(*(node.networks for node in nodes))
    details = tuple(
        Detail(
            path=path,
            message=f"there is no network {name!r}",
            hint="`virtbus network list` shows what there is; `virtbus network create` makes one",
        )
        for path, name in wanted.items()
        if name not in offered
    )
    if details:
        message = f"{details[0].path}: {details[0].message}; {details[0].hint}"
        raise VirtbusError(Code.NOT_FOUND, "network_unknown", message, details=details)


def _closed(names: set[str], namespace: str, nodes: list[NodeRecord]) -> Iterator[str]:
    for name in names - {BUILT_IN, ""}:
        offers = [node for node in nodes if name in node.networks]
        opened = (set(node.network_namespaces.get(name, ())) for node in offers)
        if offers and not any(allowed & {namespace, EVERY} for allowed in opened):
            yield name
