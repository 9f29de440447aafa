"""Results of CNI plugins that leave a part to the link: the strategies that complete them."""

import struct
from dataclasses import replace
from ipaddress import (
    IPv4Address,
    IPv4Interface,
    IPv4Network,
    IPv6Address,
    IPv6Interface,
    IPv6Network,
)
from typing import Any

import pytest
from services.netd.tests.pretended_host import make_record
from services.netd.tests.recorded_results import (
    CALICO,
    CALICO_LINK,
    CALICO_ROUTES,
    CALICO_ROUTES_6,
    FLANNEL,
    TWO_INTERFACES,
    WEAVE,
    WEAVE_0_2,
    WEAVE_LINK,
    WEAVE_ROUTES,
)

from virtbus.netd.core.address_assignment import network_mtu, replaced
from virtbus.netd.core.attachment import CniState, Nic, Route
from virtbus.netd.core.cni import planned, runtime_values
from virtbus.netd.core.cni_results import REPAIRS, PluginLink, repaired, settled
from virtbus.netd.core.dhcp import guest_routes
from virtbus.netd.core.dhcp_offer import DhcpSettings, all_offers, offers_of
from virtbus.netd.core.plan import plan_of
from virtbus.netd.core.router_advertisement import advertisement
from virtbus.netd.edge.plugin_links import router_of, routes6_in, routes_in
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.network_object import NetworkSpec, NetworkTarget

A = "0192f0c1-2d3e-7abc-8def-00000000000a"
PLAN = plan_of(make_record(A, networks=("lan",)))
ALL = IPv4Network("0.0.0.0/0")


@pytest.mark.parametrize(
    ("result", "link", "strategies", "address", "gateway"),
    [
        (CALICO, CALICO_LINK, ["routes-of-link"], "192.168.39.65/32", "169.254.1.1"),
        (FLANNEL, None, ["routes-by-gateway"], "10.244.1.5/24", "10.244.1.1"),
        (WEAVE, WEAVE_LINK, ["routes-of-link"], "10.32.0.2/12", "10.32.0.1"),
        (WEAVE_0_2, WEAVE_LINK, ["result-0.2"], "10.32.0.2/12", "10.32.0.1"),
        (
            {"cniVersion": "0.3.0"},
            WEAVE_LINK,
            ["addresses-of-link", "routes-of-link"],
            "10.32.0.2/12",
            "10.32.0.1",
        ),
        (TWO_INTERFACES, None, ["own-addresses"], "10.8.0.5/24 fd00:8::5/64", ""),
    ],
    ids=["calico", "flannel", "weave", "weave-0.2", "weave-empty", "two-interfaces"],
)
def test_each_plugin_has_its_strategy(
    result: dict[str, Any],
    link: PluginLink | None,
    strategies: list[str],
    address: str,
    gateway: str,
) -> None:
    complete, used = repaired(result, "eth0", link)
    assert used == strategies
    nic = settled(PLAN.nics[0], complete)
    assert (nic.addresses, nic.gateway) == (tuple(address.split()), gateway)
    assert repaired(complete, "eth0", link) == (complete, []), "a strategy applies once"


def routes_of(result: dict[str, Any], link: PluginLink | None) -> dict[IPv4Network, IPv4Address]:
    """The classless routes that the guest gets; empty if the router suffices."""
    nic = settled(PLAN.nics[0], repaired(result, "eth0", link)[0])
    (offer,) = offers_of(replaced(PLAN, nic), DhcpSettings())
    assert offer is not None
    return dict(guest_routes(offer))


def test_a_guest_of_calico_gets_a_route_to_its_gateway_and_one_by_it() -> None:
    way = IPv4Address("169.254.1.1")
    assert routes_of(CALICO, CALICO_LINK) == {IPv4Network(way): IPv4Address(0), ALL: way}


def test_a_guest_of_flannel_reaches_other_pods_by_the_gateway_and_not_on_its_link() -> None:
    way = IPv4Address("10.244.1.1")
    assert routes_of(FLANNEL, None) == {IPv4Network("10.244.0.0/16"): way, ALL: way}


def test_a_route_of_the_scope_link_stays_on_the_link() -> None:
    complete, _ = repaired(TWO_INTERFACES, "eth0", None)
    nic = settled(PLAN.nics[0], complete)
    assert nic.routes == (Route(destination="10.7.0.0/16"), Route(destination="fd00:7::/64"))
    with_gateway = {**FLANNEL, "routes": [{"dst": "10.7.0.0/16", "scope": 253}]}
    assert repaired(with_gateway, "eth0", None) == (with_gateway, [])


def test_the_routes_of_a_link_are_read_without_those_that_a_guest_has_anyway() -> None:
    own = [IPv4Interface("192.168.39.65/32")]
    assert tuple(routes_in(CALICO_ROUTES, "eth0", own)) == CALICO_LINK.routes
    assert tuple(routes_in(WEAVE_ROUTES, "eth0", [IPv4Interface("10.32.0.2/12")])) == (
        WEAVE_LINK.routes
    )


CALICO_6: dict[str, Any] = {
    **CALICO,
    "ips": [
        {"address": "fd00:39::41/128"},
        {"address": "192.168.39.65/32"},
    ],
}
WAY_6 = "fe80::ecee:eeff:feee:eeee"


def test_a_guest_of_calico_with_both_versions_takes_the_routes_of_both_from_the_link() -> None:
    own = tuple(routes6_in(CALICO_ROUTES_6, "eth0", [IPv6Interface("fd00:39::41/128")]))
    assert own == (Route(destination="::/0", gateway=WAY_6),)
    link = replace(CALICO_LINK, routes=(*CALICO_LINK.routes, *own))
    complete, used = repaired(CALICO_6, "eth0", link)
    nic = settled(PLAN.nics[0], complete)
    assert used == ["routes-of-link"]
    assert nic.addresses == ("192.168.39.65/32", "fd00:39::41/128")
    assert (nic.gateway, nic.gateway6, nic.routes) == ("169.254.1.1", WAY_6, ())
    assert router_of(WAY_6) == WAY_6


def test_only_the_route_to_the_network_of_an_own_address_of_ipv6_is_left_out() -> None:
    def row(to: str, bits: int) -> str:
        packed = IPv6Address(to).packed.hex()
        return f"{packed} {bits:02x} {'0' * 32} 00 {'0' * 32} 400 1 0 00000001 eth0"

    text = "\n".join((row("fd00::", 64), row("fd00::", 48)))
    found = routes6_in(text, "eth0", [IPv6Interface("fd00::5/64")])
    assert tuple(found) == (Route(destination="fd00::/48", gateway=""),)


def test_routes_and_servers_of_ipv6_are_advertised() -> None:
    routes = [{"dst": "fd00:7::/48", "gw": "fd00::1"}, {"dst": "fd00:8::/64", "scope": 253}]
    other = {"dst": "fd00:9::/64", "gw": "fd00::2"}
    result = {
        "ips": [{"address": "fd00::5/64", "gateway": "fd00::1"}],
        "routes": [*routes, other],
        "dns": {"nameservers": ["fd00::53", "192.0.2.53"]},
    }
    nic = settled(PLAN.nics[0], result).model_copy(update={"router6": "fe80::77"})
    (offers,) = all_offers(replaced(PLAN, nic), DhcpSettings())
    assert (offers.four, offers.six is not None) == (None, True)
    assert offers.six is not None
    assert (str(offers.six.server), offers.six.router) == ("fe80::77", True)
    assert offers.six.dns == (IPv6Address("fd00::53"),)
    message = advertisement(offers.six)
    way, on_link = IPv6Network("fd00:7::/48"), IPv6Network("fd00:8::/64")
    assert struct.pack("!BBBB", 24, 3, 48, 0) in message
    assert message.endswith(way.network_address.packed)
    assert struct.pack("!BBBB", 3, 4, 64, 0x80) in message
    assert on_link.network_address.packed in message
    assert IPv6Network(other["dst"]).network_address.packed not in message
    unknown = nic.model_copy(update={"router6": ""})
    (offers,) = all_offers(replaced(PLAN, unknown), DhcpSettings())
    assert offers.six is not None
    assert (offers.six.router, offers.six.routes) == (False, ())


def test_an_address_of_one_interface_is_no_address_of_a_guest() -> None:
    for ip in ({"address": "fe80::5%eth0/64"}, {"address": "fd00::5/64", "gateway": "fe80::1%9"}):
        with pytest.raises(VirtbusError, match="is of one interface"):
            settled(PLAN.nics[0], {"ips": [ip]})


def test_each_strategy_has_a_name_of_its_own() -> None:
    assert len({name for name, _ in REPAIRS}) == len(REPAIRS)


def test_a_result_that_is_complete_stays_as_it_is() -> None:
    result = {
        "ips": [{"address": "10.1.0.5/24"}, {"address": "fd00::5/64", "interface": 7}, "garbage"],
        "routes": [{"dst": "0.0.0.0/0", "gw": "10.1.0.1"}],
    }
    assert repaired(result, "eth0", WEAVE_LINK) == (result, [])


def nic_with(**extra: Any) -> Nic:
    return plan_of(make_record(A, networks=("lan",), nics=(extra,))).nics[0]


def target_with(**spec: Any) -> NetworkTarget:
    spec = {"kind": "cni", "conflist": "lan", **spec}
    return NetworkTarget(uid=A, namespace="default", name="lan", spec=NetworkSpec(**spec))


def test_the_values_of_capabilities_come_from_the_interface_and_its_network() -> None:
    port = {"host_port": 8080, "guest_port": 80, "host_address": "192.0.2.9"}
    limits = {"inbound": {"bytes_per_s": 125_000}, "outbound": {"bytes_per_s": 10**9}}
    nic = nic_with(publish=[port], limits=limits, addresses=["10.8.0.5"])
    nic = nic.model_copy(update={"target": target_with(dns=["192.0.2.53"])})
    conflist = {
        "plugins": [{"type": "bridge", "ipam": {"type": "static", "subnet": "10.8.0.0/24"}}]
    }
    assert runtime_values(conflist, nic) == {
        "mac": nic.mac,
        "ips": ["10.8.0.5/24"],
        "portMappings": [
            {"hostPort": 8080, "containerPort": 80, "protocol": "tcp", "hostIP": "192.0.2.9"}
        ],
        "bandwidth": {
            "ingressRate": 1_000_000,
            "ingressBurst": 16 * 1024 * 8,
            "egressRate": 8 * 10**9,
            "egressBurst": 80_000_000,
        },
        "dns": {"servers": ["192.0.2.53"]},
    }
    assert runtime_values(conflist, nic_with()) == {"mac": nic_with().mac}


def test_the_dns_and_the_mtu_of_a_network_object_apply_to_plugins_that_name_none() -> None:
    nic = PLAN.nics[0].model_copy(update={"target": target_with(dns=["192.0.2.53"], mtu=1300)})
    assert settled(nic, FLANNEL).dns == ("192.0.2.53",)
    named = {**FLANNEL, "dns": {"nameservers": ["192.0.2.54"]}}
    assert settled(nic, named).dns == ("192.0.2.54",)
    assert network_mtu(nic, 1400) == 1300
    with pytest.raises(VirtbusError, match="lower the network's"):
        network_mtu(nic, 1280)


PORTS = {"publish": [{"host_port": 8080, "guest_port": 80}]}
DHCP = {"type": "bridge", "bridge": "br-lan", "ipam": {"type": "dhcp"}}


@pytest.mark.parametrize(
    ("extra", "plugin", "words"),
    [
        (PORTS, {"type": "bridge"}, "add portmap with the capability portMappings"),
        (PORTS, DHCP | {"capabilities": {"portMappings": True}}, "before the guest has a lease"),
        (
            {"addresses": ["10.8.0.5"]},
            DHCP | {"capabilities": {"ips": True}},
            "a DHCP server gives",
        ),
    ],
)
def test_what_no_plugin_takes_is_refused_with_the_next_step(
    extra: dict[str, Any], plugin: dict[str, Any], words: str
) -> None:
    with pytest.raises(VirtbusError) as refused:
        planned(nic_with(**extra), CniState(conflist={"name": "lan", "plugins": [plugin]}))
    assert words in refused.value.body.details[0].message


def test_the_plugin_dhcp_is_left_out_and_the_guest_asks() -> None:
    conflist = {"name": "lan", "plugins": [DHCP, {"type": "tuning"}]}
    nic = planned(nic_with(), CniState(conflist=conflist))
    assert nic.cni is not None
    assert nic.cni.conflist["plugins"] == [DHCP | {"ipam": {}}, {"type": "tuning"}]
    assert nic.on_segment
    assert settled(nic, {"cniVersion": "1.0.0"}).addresses == ()
    bare = CniState(conflist={"plugins": [{"type": "bridge"}]})
    assert not planned(nic_with(), bare).on_segment


def test_unreadable_search_domains_are_a_refusal() -> None:
    with pytest.raises(VirtbusError, match="cannot be used") as refused:
        settled(PLAN.nics[0], {**FLANNEL, "dns": {"search": 7}})
    assert refused.value.reason == "cni_result"
