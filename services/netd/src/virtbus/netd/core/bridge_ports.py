"""Number of ports of the host's bridges, and refusal of a port beyond the kernel's limit."""

from collections import Counter
from collections.abc import Iterable

from virtbus.netd.core.attachment import Nic, NicKind
from virtbus.schemas.errors import Code, Detail, VirtbusError

PORTS_MAX = 1023
"""Maximum number of ports of a Linux bridge (`BR_MAX_PORTS` without number 0)."""
_WITHOUT_BRIDGE = frozenset({NicKind.CNI, NicKind.MACVTAP})
_SOON = PORTS_MAX * 9 // 10


def refuse_full(nic: Nic, ports: int) -> None:
    """Raise 429 `bridge_full` if the bridge of `nic`, with `ports` ports of virtbus, is full."""
    if ports >= PORTS_MAX:
        raise bridge_full(nic)


def bridge_full(nic: Nic) -> VirtbusError:
    """Return 429 `bridge_full`."""
    message = (
        f"the bridge of the network '{nic.network}' on this node has its {PORTS_MAX} ports, the "
        "most of a Linux bridge; move VMs to another node, or use another network"
    )
    detail = Detail(path=nic.network_path, message=message)
    return VirtbusError(Code.EXHAUSTED, "bridge_full", message, details=(detail,), after_ms=5_000)


def nearly_full(nics: Iterable[Nic]) -> str:
    """Return a warning about bridges with over 90 % of their ports in use; empty without any."""
    nics = [nic for nic in nics if nic.kind not in _WITHOUT_BRIDGE]
    used = Counter(nic.host_place for nic in nics)
    named = {nic.host_place: nic.network for nic in nics}
    return "; ".join(
        f"the bridge of the network {named[place]} has {count} of {PORTS_MAX} ports in use"
        for place, count in sorted(used.items())
        if count > _SOON
    )
