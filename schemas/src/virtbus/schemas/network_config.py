"""Checks a guest's network configuration, as the guest's cloud-init will read it (ADR 0043).

A value that cloud-init cannot use is a problem. An unknown key is only reported, because cloud-init
ignores the key or passes it to netplan. At the top level of version 2, an unknown key is a problem.
"""

import json
from typing import Any

from virtbus.schemas.network_findings import (
    ADDRESS,
    ADDRESS_OR_MAP,
    ADDRESSES,
    ANY,
    FLAG,
    TEXT,
    TEXTS,
    WHOLE,
    Fields,
    Findings,
    ListOf,
    Named,
    Shape,
    compare,
)

MAX_VALUES = 2000
_NAMES = ListOf(TEXT)

# --- version 1 (cloud-init: reference/network-config-format-v1) --------------------------------
_ROUTE = Fields(
    {"type": TEXT, "destination": ADDRESS, "network": ADDRESS, "address": ADDRESS, "id": ANY}
    | {"netmask": ANY, "prefix": WHOLE, "gateway": ADDRESS, "metric": WHOLE}
)
_SUBNET = Fields(
    {"type": TEXT, "control": TEXT, "address": ADDRESS, "netmask": ANY, "broadcast": ADDRESS}
    | {"gateway": ADDRESS, "dns_nameservers": ADDRESSES, "dns_search": TEXTS, "metric": WHOLE}
    | {"routes": ListOf(_ROUTE), "ipv4": FLAG, "ipv6": FLAG, "mtu": WHOLE, "scope": TEXT},
    required=("type",),
)
_DEVICE: dict[str, Shape] = {
    "type": TEXT,
    "name": TEXT,
    "mac_address": TEXT,
    "mtu": WHOLE,
    "subnets": ListOf(_SUBNET),
    "accept-ra": FLAG,
    "wakeonlan": FLAG,
    "keep_configuration": FLAG,
    "params": Named(ANY),
}
_TYPES = {
    "physical": Fields(_DEVICE, ("name",)),
    "loopback": Fields(_DEVICE, ("name",)),
    "infiniband": Fields(_DEVICE, ("name",)),
    "vlan": Fields(
        _DEVICE | {"vlan_id": WHOLE, "vlan_link": TEXT}, ("name", "vlan_id", "vlan_link")
    ),
    "bond": Fields(_DEVICE | {"bond_interfaces": _NAMES}, ("name", "bond_interfaces", "params")),
    "bridge": Fields(_DEVICE | {"bridge_interfaces": _NAMES}, ("name", "bridge_interfaces")),
    "nameserver": Fields(
        {"type": TEXT, "address": ADDRESSES, "search": TEXTS, "interface": TEXT}, ("address",)
    ),
    "route": Fields(_ROUTE.known, ("destination",)),
}

# --- version 2 (netplan's format) --------------------------------------------------------------
_V2_ROUTE: dict[str, Shape] = {
    "to": TEXT,
    "via": ADDRESS,
    "metric": WHOLE,
    "on-link": FLAG,
    "from": ADDRESS,
}
_V2_DEVICE: dict[str, Shape] = {
    **dict.fromkeys(("dhcp4", "dhcp6", "optional", "critical", "accept-ra", "wakeonlan"), FLAG),
    **dict.fromkeys(("dhcp4-overrides", "dhcp6-overrides", "parameters"), Named(ANY)),
    **dict.fromkeys(("renderer", "set-name", "macaddress", "dhcp-identifier", "link"), TEXT),
    **dict.fromkeys(("link-local", "interfaces"), _NAMES),
    **dict.fromkeys(("gateway4", "gateway6"), ADDRESS),
    **dict.fromkeys(("mtu", "ipv6-mtu", "id"), WHOLE),
    "match": Fields({"name": TEXTS, "macaddress": TEXT, "driver": TEXTS}),
    "addresses": ListOf(ADDRESS_OR_MAP),
    "nameservers": Fields({"search": _NAMES, "addresses": ListOf(ADDRESS)}),
    "routes": ListOf(
        Fields({**_V2_ROUTE, "type": TEXT, "scope": TEXT, "table": WHOLE, "mtu": WHOLE}, ("to",))
    ),
    "routing-policy": ListOf(Named(ANY)),
    "optional-addresses": _NAMES,
    "ipv6-privacy": FLAG,
    "ipv6-address-generation": TEXT,
    "activation-mode": TEXT,
}
_V2: dict[str, Shape] = {
    "ethernets": Named(Fields(_V2_DEVICE)),
    "vlans": Named(Fields(_V2_DEVICE, ("id", "link"))),
    "bonds": Named(Fields(_V2_DEVICE)),
    "bridges": Named(Fields(_V2_DEVICE)),
    **dict.fromkeys(
        ("wifis", "modems", "tunnels", "vrfs", "dummy-devices", "virtual-ethernets"),
        Named(Named(ANY)),
    ),
}
_V2_OTHER: dict[str, Shape] = {"version": ANY, "renderer": TEXT}

# --- OpenStack's network_data.json -------------------------------------------------------------
_LINK: dict[str, Shape] = {
    "id": ANY,
    "type": TEXT,
    "name": TEXT,
    "ethernet_mac_address": TEXT,
    "mtu": WHOLE,
    "vif_id": TEXT,
    "vlan_link": TEXT,
    "vlan_id": WHOLE,
    "vlan_mac_address": TEXT,
    "bond_links": _NAMES,
    "bond_mode": TEXT,
    "bond_xmit_hash_policy": TEXT,
    "bond_miimon": WHOLE,
    "network_id": TEXT,
}
_NETWORK: dict[str, Shape] = {
    "id": ANY,
    "link": ANY,
    "type": TEXT,
    "network_id": TEXT,
    "ip_address": ADDRESS,
    "netmask": ANY,
    "gateway": ADDRESS,
    "routes": ListOf(_ROUTE),
    "dns_nameservers": ADDRESSES,
    "services": ListOf(Fields({"type": TEXT, "address": ADDRESS}, ("address",))),
}
_LINK_NEEDS = {
    "vlan": ("vlan_link", "vlan_id", "vlan_mac_address"),
    "bond": ("bond_links",),
}
_OPENSTACK = Fields(
    {
        "links": ListOf(Fields(_LINK, ("id", "type"))),
        "networks": ListOf(Fields(_NETWORK, ("link", "type"))),
        "services": ListOf(Fields({"type": TEXT, "address": ADDRESS}, ("address",))),
    }
)


def check_network_config(data: bytes) -> Findings:
    """Return the findings about a NoCloud seed's network-config. Blank data has none."""
    from virtbus.schemas.yaml_text import YamlError, read_yaml  # the import takes 27 ms

    found = Findings()
    try:
        value = read_yaml(data.decode(), max_values=MAX_VALUES)
    except UnicodeDecodeError:
        found.problem("", "must be text in UTF-8; cloud-init unpacks no network data")
        return found
    except YamlError as error:
        found.problem("", f"is not YAML: {error}")
        return found
    if isinstance(value, dict) and set(value) == {"network"}:
        value = value["network"]  # cloud-init accepts this key since 24.1
    if value is not None and not _disables(value):
        _check_version(value, found)
    return found


def _disables(value: Any) -> bool:
    return isinstance(value, dict) and value.get("config") == "disabled"


def _check_version(value: Any, found: Findings) -> None:
    version = value.get("version") if isinstance(value, dict) else None
    if version not in (1, 2) or isinstance(version, bool):
        message = "must be a map with version: 1 or version: 2 (cloud-init: network configuration)"
        found.problem("", message)
    elif version == 1:
        _check_v1(value, found)
    else:
        _check_v2(value, found)


def _check_v1(value: dict[str, Any], found: Findings) -> None:
    config = value.get("config")
    if not isinstance(config, list):
        found.problem("config", "must be a list of maps with a type")
        return
    for key in value.keys() - {"version", "config"}:
        found.unknown_key(str(key)[:64])
    for index, item in enumerate(config):
        kind = item.get("type") if isinstance(item, dict) else None
        shape = _TYPES.get(kind) if isinstance(kind, str) else None
        if shape is None:
            message = f"must be one of {', '.join(_TYPES)}"
            found.problem(f"config[{index}].type", message)
        else:
            compare(item, shape, f"config[{index}]", found)


def _check_v2(value: dict[str, Any], found: Findings) -> None:
    known = _V2 | _V2_OTHER
    for key, item in value.items():
        shape = known.get(key) if isinstance(key, str) else None
        if shape is None:
            # cloud-init without netplan fails on such a key, and the guest has no network
            found.problem(str(key)[:64], f"is unknown; known are {', '.join(known)}")
        else:
            compare(item, shape, key, found)


def check_network_data(data: bytes) -> Findings:
    """Return the findings about a config drive's network_data.json."""
    found = Findings()
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        message = (
            "must be OpenStack's network_data.json, a JSON object; a network-config goes with "
            "cloud_init_no_cloud"
        )
        found.problem("", message)
        return found
    compare(value, _OPENSTACK, "", found)
    links = value.get("links")
    for index, link in enumerate(links if isinstance(links, list) else ()):
        if isinstance(link, dict):
            _check_link(link, f"links[{index}]", found)
    return found


def _check_link(link: dict[str, Any], path: str, found: Findings) -> None:
    kind = link.get("type")
    needs = _LINK_NEEDS.get(kind) if isinstance(kind, str) else None
    if needs is None and not link.get("name") and not link.get("ethernet_mac_address"):
        found.problem(f"{path}.ethernet_mac_address", "is missing, and there is no name either")
    for name in needs or ():
        if link.get(name) is None:
            found.problem(f"{path}.{name}", "is missing")
