"""Network data that cloud-init could not use is refused by its path; odd keys are reported."""

import json
import textwrap
from typing import Any

import pytest
from pydantic import ValidationError

from virtbus.schemas.network_config import MAX_VALUES, check_network_config, check_network_data
from virtbus.schemas.network_findings import MAX_FINDINGS
from virtbus.schemas.seed import NETWORK_LATER, CloudInitConfigDrive, CloudInitNoCloud

V1 = """\
version: 1
config:
- type: physical
  name: eth0
  mac_address: "52:54:00:12:34:56"
  mtu: 1450
  subnets:
  - {type: static, address: 10.0.0.5/24, gateway: 10.0.0.1, dns_nameservers: [10.0.0.2]}
  - {type: dhcp6}
  - type: static
    address: 10.1.0.5
    netmask: 255.255.255.0
    routes: [{network: 10.2.0.0, netmask: 255.255.0.0, gateway: 10.1.0.1}]
- {type: vlan, name: eth0.7, vlan_link: eth0, vlan_id: 7, subnets: [{type: manual}]}
- {type: bond, name: bond0, bond_interfaces: [eth1, eth2], params: {bond-mode: active-backup}}
- {type: bridge, name: br0, bridge_interfaces: [eth3], params: {bridge_stp: "off"}}
- {type: nameserver, address: [10.0.0.2, "2001:db8::1"], search: [example.com]}
- {type: route, destination: 10.3.0.0/16, gateway: 10.0.0.9, metric: 3}
- {type: loopback, name: lo}
"""
V2 = """\
version: 2
renderer: networkd
ethernets:
  first:
    match: {macaddress: "52:54:00:12:34:56"}
    set-name: lan0
    dhcp4: true
    dhcp4-overrides: {route-metric: 10}
    mtu: null
  second:
    addresses: [10.0.0.5/24, "2001:db8::5/64", {10.0.0.6/24: {label: more}}]
    gateway4: 10.0.0.1
    nameservers: {search: [example.com], addresses: [10.0.0.2]}
    routes: [{to: default, via: 10.0.0.1}, {to: 10.3.0.0/16, via: 10.0.0.9, metric: 3}]
vlans: {lan7: {id: 7, link: first, dhcp4: no}}
bonds: {bond0: {interfaces: [third], parameters: {mode: active-backup}}}
bridges: {br0: {interfaces: [fourth]}}
tunnels: {he: {mode: sit}}
"""
OPENSTACK: dict[str, Any] = {
    "links": [
        {"id": "a", "type": "phy", "ethernet_mac_address": "52:54:00:12:34:56", "mtu": 1400},
        {"id": "b", "type": "vlan", "vlan_link": "a", "vlan_id": 7, "vlan_mac_address": "x"},
        {"id": "c", "type": "bond", "bond_links": ["a"], "bond_mode": "802.3ad"},
    ],
    "networks": [
        {"id": "n0", "type": "ipv4_dhcp", "link": "a"},
        {
            "id": "n1",
            "type": "ipv4",
            "link": "b",
            "ip_address": "10.0.0.5",
            "netmask": "255.255.255.0",
            "gateway": "10.0.0.1",
            "routes": [{"network": "0.0.0.0", "netmask": "0.0.0.0", "gateway": "10.0.0.1"}],
        },
    ],
    "services": [{"type": "dns", "address": "10.0.0.2"}],
}


@pytest.mark.parametrize(
    "text",
    [V1, V2, "network:\n" + textwrap.indent(V2, "  "), "config: disabled\n", "", "# none\n"],
)
def test_what_cloud_init_uses_is_accepted_without_remarks(text: str) -> None:
    found = check_network_config(text.encode())
    assert (found.problems, found.unknown) == ([], [])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: [", "is not YAML"),
        ("- 1", "must be a map with version"),
        ("version: 3", "must be a map with version"),
        ("version: '2'", "must be a map with version"),
        ("version: true", "must be a map with version"),
        ("ethernets: {}", "must be a map with version"),
        ("version: 1", "config: must be a list"),
        ("version: 1\nconfig: [a]", "config[0].type: must be one of"),
        ("version: 1\nconfig: [{type: wifi}]", "config[0].type: must be one of"),
        ("version: 1\nconfig: [{type: physical}]", "config[0].name: is missing"),
        ("version: 1\nconfig: [{type: vlan, name: a, vlan_id: 1}]", "config[0].vlan_link: is"),
        (
            "version: 1\nconfig: [{type: physical, name: a, subnets: [{address: x}]}]",
            "config[0].subnets[0].type: is missing",
        ),
        (
            "version: 1\nconfig: [{type: physical, name: a, mac_address: 52:54:00:12:34:56}]",
            "config[0].mac_address: must be text (in quotes",
        ),
        ("version: 2\nethernets: []", "ethernets: must be a map"),
        ("version: 2\nethernets: {a: 1}", "ethernets.a: must be a map"),
        ("version: 2\nethernets: {a: {mtu: big}}", "ethernets.a.mtu: must be a whole number"),
        ("version: 2\nethernets: {a: {mtu: true}}", "ethernets.a.mtu: must be a whole number"),
        ("version: 2\nethernets: {a: {addresses: 1}}", "ethernets.a.addresses: must be a list"),
        ("version: 2\nethernets: {a: {addresses: [b]}}", "ethernets.a.addresses[0]: must be an IP"),
        ("version: 2\nethernets: {a: {gateway4: b}}", "ethernets.a.gateway4: must be an IP"),
        ("version: 2\nethernets: {a: {routes: [{via: 10.0.0.1}]}}", "routes[0].to: is missing"),
        ("version: 2\nethernet: {}", "ethernet: is unknown; known are ethernets"),
        ("version: 2\nvlans: {a: {id: 7}}", "vlans.a.link: is missing"),
        (f"version: 1\nconfig: [{'a,' * MAX_VALUES}]", "is not YAML: more than"),
    ],
)
def test_what_cloud_init_cannot_use_is_refused_by_its_path(text: str, problem: str) -> None:
    found = check_network_config(text.encode())
    assert problem in found.problems[0]


def test_unknown_keys_are_reported_and_both_lists_have_a_bound() -> None:
    found = check_network_config(
        b"version: 1\nconfig: [{type: physical, name: a, dhcp: 1, subnets: [{type: x, 1: 2}]}]\n"
    )
    assert (found.problems, found.unknown) == ([], ["config[0].dhcp", "config[0].subnets[0].1"])
    many = ", ".join(f"e{n}: {{x: 1, mtu: x}}" for n in range(99))
    found = check_network_config(f"version: 2\nethernets: {{{many}}}".encode())
    assert len(found.problems) == len(found.unknown) == MAX_FINDINGS


def test_text_must_be_utf_8() -> None:
    assert "UTF-8" in check_network_config(b"\x1f\x8b").problems[0]


def test_openstacks_network_data_is_checked_too() -> None:
    found = check_network_data(json.dumps(OPENSTACK).encode())
    assert (found.problems, found.unknown) == ([], [])
    assert check_network_data(b"{}").problems == []


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ([], "network_data.json"),
        ({"links": {}}, "links: must be a list"),
        ({"links": [{"type": "phy", "name": "a"}]}, "links[0].id: is missing"),
        ({"links": [{"id": "a", "type": "phy"}]}, "links[0].ethernet_mac_address: is missing"),
        ({"links": [{"id": "a", "type": "vlan"}]}, "links[0].vlan_link: is missing"),
        ({"links": [{"id": "a", "type": "bond"}]}, "links[0].bond_links: is missing"),
        ({"networks": [{"link": "a"}]}, "networks[0].type: is missing"),
        ({"networks": [{"link": "a", "type": "b", "ip_address": "c"}]}, "must be an IP"),
        ({"services": [{"type": "dns"}]}, "services[0].address: is missing"),
    ],
)
def test_wrong_network_data_is_refused_by_its_path(value: Any, problem: str) -> None:
    assert problem in check_network_data(json.dumps(value).encode()).problems[0]


def test_a_seed_checks_its_network_data_unless_its_reader_does() -> None:
    for kind, text in ((CloudInitNoCloud, "version: 3"), (CloudInitConfigDrive, "version: 2")):
        with pytest.raises(ValidationError, match="network data: must be"):
            kind(network_data=text)
        seed = kind.model_validate({"network_data": text}, context=NETWORK_LATER)
        assert seed.network_findings().problems
