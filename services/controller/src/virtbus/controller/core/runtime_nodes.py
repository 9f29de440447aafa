"""Limits a node's container runtime to that node (ADR 0059)."""

from collections.abc import Mapping

from virtbus.bus.client.owners import node_of
from virtbus.controller.core.demand import HOSTNAME
from virtbus.schemas.errors import Code, Detail, VirtbusError
from virtbus.schemas.vm import VmRecord, VmSpec


def check_selector(node: str, labels: Mapping[str, str], selector: Mapping[str, str]) -> None:
    """Raise 403 `not_its_node` unless `selector` selects the host of `node`, which has `labels`.

    An empty `node` allows any selector, because the account may use all nodes.
    """
    if node and selector.get(HOSTNAME) != labels.get(HOSTNAME, node):
        raise _refused(node)


def check_update(before: VmRecord, after: VmRecord, labels: Mapping[str, str]) -> None:
    """Raise 403 `not_its_node` if an update makes a runtime's VM select another node.

    `labels` are the labels of the runtime's node.
    """
    selector = after.spec.node_selector
    if selector != before.spec.node_selector:
        check_selector(node_of(after.owner), labels, selector)


def check_devices(node: str, spec: VmSpec) -> None:
    """Raise 403 `device_denied` if a spec has host devices, and its sender is no runtime.

    `node` is the runtime's node; empty for other accounts. Only the runtime may give the path of a
    device, because the path is valid on that node only.
    """
    for index, volume in enumerate(spec.volumes):
        if volume.host_device is not None and not node:
            message = (
                "only the container runtime of a node may give a VM a device of the node; use a "
                "volume in a pool of devices (docs/howto/pools.md)"
            )
            detail = Detail(path=f"spec.volumes[{index}].host_device", message=message)
            raise VirtbusError(Code.DENIED, "device_denied", message, details=(detail,))


def check_node(node: str, wanted: str | None) -> None:
    """Raise 403 `not_its_node` unless `wanted` is `node`. An empty `node` allows any node."""
    if node and wanted != node:
        raise _refused(node)


def _refused(node: str) -> VirtbusError:
    message = f"the credentials of the container runtime of {node} work for {node} only"
    return VirtbusError(Code.DENIED, "not_its_node", message)
