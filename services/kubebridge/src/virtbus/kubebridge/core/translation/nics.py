"""Changes of the interfaces of a running VM."""

from virtbus.kubebridge.core.objects.unstructured import Object, items, part, text
from virtbus.schemas.vm import Interface, VmSpec

ABSENT = "absent"
"""The state of an interface that is to be unplugged."""
NICS = ("domain", "devices", "interfaces")


def is_absent(nic: Object) -> bool:
    """Return True if the interface is to be unplugged."""
    return text(nic, "state") == ABSENT


def without_absent(vmi: Object) -> Object:
    """Return a VMI without the interfaces that are to be unplugged, and without their networks."""
    spec = part(vmi, "spec")
    gone = {text(nic, "name") for nic in items(spec, *NICS) if is_absent(nic)}
    if not gone:
        return vmi
    domain, devices = part(spec, "domain"), part(spec, "domain", "devices")
    nics = [nic for nic in items(spec, *NICS) if not is_absent(nic)]
    networks = [one for one in items(spec, "networks") if text(one, "name") not in gone]
    domain = {**domain, "devices": {**devices, "interfaces": nics}}
    return {**vmi, "spec": {**spec, "domain": domain, "networks": networks}}


def replugged(has: VmSpec, wants: VmSpec) -> VmSpec | None:
    """Return the spec `has` with the interfaces of `wants`; None if both have the same interfaces.

    An interface that both have keeps its properties; only its link state comes from `wants`.
    """
    nics = {nic.name: nic for nic in has.domain.devices.interfaces}
    networks = {one.name: one for one in has.networks}
    devices = has.domain.devices.model_copy(
        update={
            "interfaces": tuple(
                _stated(nics.get(nic.name, nic), nic) for nic in wants.domain.devices.interfaces
            )
        }
    )
    found = has.model_copy(
        update={
            "domain": has.domain.model_copy(update={"devices": devices}),
            "networks": tuple(networks.get(one.name, one) for one in wants.networks),
        }
    )
    return None if found == has else found


def _stated(nic: Interface, wanted: Interface) -> Interface:
    return nic.model_copy(update={"state": wanted.state})
