"""Refuses a spec that does not fit its networks, before the VM is stored.

netd repeats these checks at the VM's start. netd also checks the conflists of its node, which the
controller does not know.
"""

import json
from collections.abc import Iterator

from virtbus.controller.core.network_demand import Targets
from virtbus.schemas.cni_config import plugins_differ, plugins_digest
from virtbus.schemas.errors import Detail
from virtbus.schemas.network_object import (
    BUILT_IN,
    ON_SEGMENTS,
    NetworkKind,
    NetworkSpec,
    NetworkTarget,
)
from virtbus.schemas.nic import NicBinding
from virtbus.schemas.vm import Interface, VmSpec
from virtbus.schemas.wire import invalid

_WITHOUT_GATEWAY = ON_SEGMENTS | {NetworkKind.ISOLATED}
_ADDRESSED_ELSEWHERE = ON_SEGMENTS | {NetworkKind.CNI}


def refuse_misfits(spec: VmSpec, targets: Targets) -> None:
    """Check bindings and CNI plugins against the networks of a spec.

    Raises:
        VirtbusError: 400: the details have the fields.
    """
    names = {network.name: network.network for network in spec.networks}
    details = tuple(
        Detail(path=f"spec.domain.devices.interfaces[{index}].binding", message=message)
        for index, nic in enumerate(spec.domain.devices.interfaces)
        if nic.name in names
        for message in _misfits(nic, names[nic.name], targets.get(names[nic.name]))
    )
    if details:
        raise invalid(details)
    for index, network in enumerate(spec.networks):
        target = targets.get(network.network)
        if network.plugins_digest is None or (target is None and network.network != BUILT_IN):
            continue
        if target is None or target.spec.kind is not NetworkKind.CNI:
            kind = "nat" if target is None else target.spec.kind
            raise plugins_differ(index, network.network, f"it is a {kind} network")
        if _other_plugins(target.spec, network.plugins_digest):
            raise plugins_differ(index, network.network, "its conflist is another one")


def _misfits(nic: Interface, network: str, target: NetworkTarget | None) -> Iterator[str]:
    kind = target.spec.kind if target is not None else None
    if nic.binding is NicBinding.MACVTAP and kind is not NetworkKind.MACVTAP:
        yield f"{network!r} is no network of the kind macvtap; write bridge, or use another one"
    if nic.binding is NicBinding.MASQUERADE and kind in _WITHOUT_GATEWAY:
        yield (
            f"{network!r} is of the kind {kind}, on which no address or no gateway is known for "
            "the VM's namespace; write bridge, or use another network"
        )
    if nic.binding is NicBinding.PASST and kind in _ADDRESSED_ELSEWHERE:
        yield (
            f"{network!r} is of the kind {kind}, which gives the address itself; write bridge, or "
            "use another network"
        )


def _other_plugins(spec: NetworkSpec, digest: str) -> bool:
    """Return True if the object has a conflist of its own with other plugins."""
    return spec.config is not None and plugins_digest(json.loads(spec.config)) != digest
