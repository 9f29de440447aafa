"""Tells added and removed interfaces from other changes, and checks each interface's network."""

from collections import Counter
from typing import Any

from virtbus.schemas.errors import Detail
from virtbus.schemas.vm import VmSpec
from virtbus.schemas.wire import invalid

Plain = dict[str, Any]
_NICS, _NETWORKS = "spec.domain.devices.interfaces", "spec.networks"


def with_nics_of(before: Plain, after: Plain) -> Plain:
    """Return `before` with the interfaces and networks of `after`; names identify them.

    Entries that both specs have keep their values of `before`. So a comparison of the result with
    `after` shows all changes other than added and removed entries. If the common interfaces are in
    another order, `before` is returned unchanged.
    """
    old = {nic["name"]: nic for nic in _nics(before)}
    new = [nic["name"] for nic in _nics(after)]
    if [name for name in old if name in new] != [name for name in new if name in old]:
        return before
    networks = {network["name"]: network for network in before["networks"]}
    domain = before["domain"]
    nics = [old.get(nic["name"], nic) for nic in _nics(after)]
    return {
        **before,
        "networks": [networks.get(one["name"], one) for one in after["networks"]],
        "domain": {**domain, "devices": {**domain["devices"], "interfaces": nics}},
    }


def _nics(spec: Plain) -> list[Plain]:
    nics: list[Plain] = spec["domain"]["devices"]["interfaces"]
    return nics


def check_partners(spec: VmSpec) -> None:
    """Refuse interfaces without a network, networks without an interface, and repeated names.

    Raises:
        VirtbusError: 400: the details list the refused entries.
    """
    nics = [nic.name for nic in spec.domain.devices.interfaces]
    networks = [network.name for network in spec.networks]
    found = [
        Detail(path=f"{path}[{index}].name", message=message)
        for path, names, others, partner in (
            (_NICS, nics, networks, "network"),
            (_NETWORKS, networks, nics, "interface"),
        )
        for index, name in enumerate(names)
        if (message := _problem(name, Counter(names[:index]), others, partner))
    ]
    if found:
        raise invalid(tuple(found))


def _problem(name: str, earlier: Counter[str], others: list[str], partner: str) -> str:
    if earlier[name]:
        return f"{name!r} is used twice"
    return "" if name in others else f"no {partner} is named {name!r}; add one"
