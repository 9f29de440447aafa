"""Converts libvirt's domains to `DomainFacts`, and restricts calls to domains of virtbus."""

from collections.abc import Callable
from typing import TypeVar

import libvirt

from virtbus.nodeagent.core.domain_xml import domain_name
from virtbus.nodeagent.core.metadata import NAMESPACE, parse
from virtbus.nodeagent.core.ports import DomainFacts, DomainMetadata, DomainState, Ending
from virtbus.nodeagent.edge.libvirt_links import LibvirtLinks

Result = TypeVar("Result")

_STATES: dict[int, DomainState] = {
    libvirt.VIR_DOMAIN_RUNNING: DomainState.RUNNING,
    libvirt.VIR_DOMAIN_BLOCKED: DomainState.RUNNING,
    libvirt.VIR_DOMAIN_PAUSED: DomainState.PAUSED,
    libvirt.VIR_DOMAIN_PMSUSPENDED: DomainState.PAUSED,
    libvirt.VIR_DOMAIN_SHUTDOWN: DomainState.SHUTTING_DOWN,
    libvirt.VIR_DOMAIN_SHUTOFF: DomainState.SHUT_OFF,
    libvirt.VIR_DOMAIN_CRASHED: DomainState.SHUT_OFF,
}
_ENDINGS: dict[int, Ending] = {
    libvirt.VIR_DOMAIN_SHUTOFF_SHUTDOWN: Ending.SHUT_DOWN,
    libvirt.VIR_DOMAIN_SHUTOFF_DESTROYED: Ending.ENDED,
    libvirt.VIR_DOMAIN_SHUTOFF_CRASHED: Ending.CRASHED,
}


def is_ours(domain: libvirt.virDomain) -> bool:
    """Return True for a domain of virtbus. The name of such a domain is `vb-<its UUID>`."""
    return domain.name() == domain_name(domain.UUIDString())


def facts_of(domain: libvirt.virDomain) -> DomainFacts | None:
    """Return the domain's facts; None if libvirt no longer has the domain."""
    try:
        state, reason = domain.state()
        metadata = _metadata(domain)
    except libvirt.libvirtError as error:
        if error.get_error_code() == libvirt.VIR_ERR_NO_DOMAIN:
            return None
        raise
    return DomainFacts(
        domain.UUIDString(),
        *state_of(state, reason),
        metadata,
        (state, reason) == (libvirt.VIR_DOMAIN_PAUSED, libvirt.VIR_DOMAIN_PAUSED_IOERROR),
    )


def state_of(state: int, reason: int) -> tuple[DomainState, Ending]:
    """Translate libvirt's state and reason to the domain's state and the guest's ending."""
    kind = _STATES.get(state, DomainState.RUNNING)
    if kind is DomainState.PAUSED and reason == libvirt.VIR_DOMAIN_PAUSED_STARTING_UP:
        return DomainState.STARTING, Ending.UNKNOWN
    if state == libvirt.VIR_DOMAIN_CRASHED:
        return kind, Ending.CRASHED
    if kind is DomainState.SHUT_OFF:
        return kind, _ENDINGS.get(reason, Ending.UNKNOWN)
    return kind, Ending.UNKNOWN


def _metadata(domain: libvirt.virDomain) -> DomainMetadata | None:
    try:
        return parse(domain.metadata(libvirt.VIR_DOMAIN_METADATA_ELEMENT, NAMESPACE))
    except libvirt.libvirtError as error:
        if error.get_error_code() == libvirt.VIR_ERR_NO_DOMAIN_METADATA:
            return None
        raise


async def on_ours(
    links: LibvirtLinks,
    uid: str,
    work: Callable[[libvirt.virDomain], Result],
    doing: str,
    *,
    timeout_s: float,
    ended: Callable[[], None] = lambda: None,
) -> Result | None:
    """Return the result of `work` on the domain of `uid`.

    Return None if libvirt has no such domain, or if the domain is not of virtbus. `doing` names the
    operation in errors. `ended` is called when `work` has ended, however late, or cannot begin.
    """

    def run(connection: libvirt.virConnect) -> Result | None:
        try:
            domain = connection.lookupByUUIDString(uid)
            return work(domain) if is_ours(domain) else None
        except libvirt.libvirtError as error:
            if error.get_error_code() == libvirt.VIR_ERR_NO_DOMAIN:
                return None
            raise

    return await links.run(run, doing, timeout_s=timeout_s, ended=ended)
