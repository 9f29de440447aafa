"""Limits a node's container runtime to its own node (ADR 0059)."""

from collections.abc import Mapping

from virtbus.controller.core.demand import HOSTNAME
from virtbus.schemas.errors import Code, VirtbusError


def check_selector(node: str, labels: Mapping[str, str], selector: Mapping[str, str]) -> None:
    """Raise 403 `not_its_node` unless `selector` selects the host of `node`, with these labels.

    `node` is empty for an account that may use all nodes.
    """
    if node and selector.get(HOSTNAME) != labels.get(HOSTNAME, node):
        raise _refused(node)


def check_node(node: str, wanted: str | None) -> None:
    """Raise 403 `not_its_node` unless `wanted` is `node`; an empty `node` may use all nodes."""
    if node and wanted != node:
        raise _refused(node)


def _refused(node: str) -> VirtbusError:
    message = f"the credentials of the container runtime of {node} work for {node} only"
    return VirtbusError(Code.DENIED, "not_its_node", message)
