"""Permission of namespaces to use CNI networks."""

from collections.abc import Mapping

from virtbus.schemas.errors import Code, VirtbusError

EVERY = "*"
"""As a network: each network without its own entry. As a namespace: all namespaces."""

Openings = Mapping[str, tuple[str, ...]]
"""The namespaces that may use a network, by network."""


def namespaces_of(network: str, openings: Openings) -> tuple[str, ...]:
    """Return the namespaces that may use a network; none without an entry for it or EVERY."""
    return tuple(openings.get(network, openings.get(EVERY, ())))


def check_open(network: str, namespace: str, openings: Openings) -> None:
    """Raise 403 `network_closed` if the namespace may not use the network."""
    allowed = namespaces_of(network, openings)
    if EVERY in allowed or namespace in allowed:
        return
    message = (
        f"the network '{network}' of this node is not open to the namespace '{namespace}'; its"
        " operator opens it in netd's setting network_namespaces"
    )
    raise VirtbusError(Code.DENIED, "network_closed", message)
