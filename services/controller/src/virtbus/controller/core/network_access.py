"""Checks that nodes open the networks of a VM to the VM's namespace."""

from collections.abc import Collection, Iterable, Iterator, Sequence

from virtbus.controller.core.network_demand import NO_TARGETS, Targets
from virtbus.schemas.errors import Code, Detail, VirtbusError
from virtbus.schemas.network_object import BUILT_IN
from virtbus.schemas.node import NodeRecord
from virtbus.schemas.vm import VmSpec

EVERY = "*"


def check_networks(
    spec: VmSpec, namespace: str, nodes: Iterable[NodeRecord], targets: Targets = NO_TARGETS
) -> None:
    """Raise 403 if nodes offer a network of the spec, but no node opens it to the namespace."""
    wanted = _wanted(spec, targets)
    if not wanted:
        return
    closed = set(_closed(set(wanted.values()), namespace, list(nodes)))
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


def refuse_unknown(
    spec: VmSpec,
    nodes: Iterable[NodeRecord],
    targets: Targets,
    unheard: Sequence[str],
    *,
    known: Collection[str] = (),
) -> None:
    """Refuse a network if it is no object, no node offers it, and it is not in `known`.

    Raises:
        VirtbusError: 404 `network_unknown`: the details have the fields. 503 `networks_unheard`: no
            node has reported yet, or nodes that have VMs (`unheard`) have not reported yet.
    """
    wanted = _wanted(spec, targets)
    if not wanted:
        return
    there = list(nodes)
    offered = set[str]().union(*(node.networks for node in there))
    details = tuple(
        Detail(
            path=path,
            message=f"there is no network {name!r}",
            hint="`virtbus network list` shows what there is; `virtbus network create` makes one",
        )
        for path, name in wanted.items()
        if name not in offered and name not in known
    )
    if not details:
        return
    message = f"{details[0].path}: {details[0].message}"
    if there and not unheard:
        message = f"{message}; {details[0].hint}"
        raise VirtbusError(Code.NOT_FOUND, "network_unknown", message, details=details)
    silent = f"{', '.join(unheard)} did not report yet" if unheard else "no node has reported yet"
    message = f"{message} of the nodes that are known ({silent}); repeat later"
    raise VirtbusError(
        Code.UNAVAILABLE, "networks_unheard", message, details=details, after_ms=2000
    )


def _wanted(spec: VmSpec, targets: Targets) -> dict[str, str]:
    """Return, by field path, the networks that a node itself must offer, without `default`."""
    wanted = {
        f"spec.networks[{index}].network": _offered(network.network, targets)
        for index, network in enumerate(spec.networks)
    }
    return {path: name for path, name in wanted.items() if name not in {"", BUILT_IN}}


def _offered(name: str, targets: Targets) -> str:
    """Return the network that a node must offer for `name`; empty if its object has no conflist."""
    target = targets.get(name)
    return name if target is None else target.spec.conflist or ""


def _closed(names: set[str], namespace: str, nodes: list[NodeRecord]) -> Iterator[str]:
    for name in names:
        offers = [node for node in nodes if name in node.networks]
        opened = (set(node.network_namespaces.get(name, ())) for node in offers)
        if offers and not any(allowed & {namespace, EVERY} for allowed in opened):
            yield name
