"""Tenancy of CNI networks: which namespaces may attach VMs to a network."""

from collections.abc import Mapping

from virtbus.schemas.errors import Code, VirtbusError

EVERY = "*"
"""As a network: each one that is not named itself. As a namespace: all of them."""

Openings = Mapping[str, tuple[str, ...]]
"""Network to the namespaces that may use it."""


def namespaces_of(network: str, openings: Openings) -> tuple[str, ...]:
    """The namespaces that may use a network; nobody where it is not named."""
    return tuple(openings.get(network, openings.get(EVERY, ())))


def check_open(network: str, namespace: str, openings: Openings) -> None:
    """Raise 403 `network_closed` where the namespace may not use the network."""
    allowed = namespaces_of(network, openings)
    if EVERY in allowed or namespace in allowed:
        return
    message = (
        f"the network '{network}' of this node is not open to the namespace '{namespace}'; its"
        " operator opens it in netd's setting network_namespaces"
    )
    raise VirtbusError(Code.DENIED, "network_closed", message)
