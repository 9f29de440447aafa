"""Translation of the ports of masquerade and passt, and of the networks of masquerade."""

from collections.abc import Iterator
from ipaddress import ip_network

from virtbus.kubebridge.core.fields.translator import Path, Translation
from virtbus.kubebridge.core.objects.status_errors import Cause
from virtbus.kubebridge.core.objects.unstructured import Object, at, items, text

_CIDRS = {"vmNetworkCIDR": "vm_network_cidr", "vmIPv6NetworkCIDR": "vm_ipv6_network_cidr"}
_NICS = ("domain", "devices", "interfaces")
_LAST = "last_port"


def fill(walked: Translation, spec: Object, prefix: str) -> None:
    """Add ports to each interface with masquerade or passt, and networks to those with masquerade.

    With other bindings KubeVirt ignores these fields: a list of ports does not close other ports.
    """
    networks = {
        text(one, "name"): (one, f"{prefix}.networks[{index}].pod")
        for index, one in enumerate(items(spec, "networks"))
    }
    for index, nic in enumerate(items(spec, *_NICS)):
        if at(nic, "masquerade") is None and not _is_passt(nic):
            continue
        place: Path = ("spec", *_NICS, index)
        _ports(walked, nic, place, f"{prefix}.{'.'.join(_NICS)}[{index}]")
        if _is_passt(nic):
            continue
        network, field = networks.get(text(nic, "name"), ({}, ""))
        _cidrs(walked, network, place, field)


def _is_passt(nic: Object) -> bool:
    return any(at(nic, name) is not None for name in ("passtBinding", "passt", "binding"))


def _ports(walked: Translation, nic: Object, place: Path, field: str) -> None:
    for number, (port, last, origin) in enumerate(_listed(nic, field)):
        here = (*place, "ports", number)
        walked.put(here, {}, origin)
        walked.put((*here, "port"), at(port, "port" if last is None else "start"), origin)
        if last is not None:
            walked.put((*here, _LAST), last, f"{origin}.end")
        walked.put((*here, "protocol"), (text(port, "protocol") or "TCP").lower(), origin)


def _listed(nic: Object, field: str) -> Iterator[tuple[Object, object, str]]:
    """Yield each port or range with its last port and its manifest field.

    A single port has None as the last port.
    """
    for index, one in enumerate(items(nic, "ports")):
        yield one, None, f"{field}.ports[{index}]"
    for index, one in enumerate(items(nic, "portRanges")):
        yield one, at(one, "end"), f"{field}.portRanges[{index}]"


def _cidrs(walked: Translation, network: Object, place: Path, field: str) -> None:
    for name, ours in _CIDRS.items():
        given = text(network, "pod", name)
        if not given:
            continue
        try:
            found = str(ip_network(given, strict=False))  # Go's net.ParseCIDR allows host bits
        except ValueError as error:
            walked.causes.append(Cause(f"{field}.{name}", str(error)))
        else:
            walked.put((*place, ours), found, f"{field}.{name}")
