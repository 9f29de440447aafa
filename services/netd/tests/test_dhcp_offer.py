"""The DHCP offer of each interface: a function of the attachment and the node's settings."""

from ipaddress import IPv4Address, IPv4Interface, IPv6Address
from typing import Any

import pytest
from pydantic import ValidationError
from services.netd.tests.pretended_host import make_record, settled
from services.netd.tests.test_dhcp import request
from services.netd.tests.test_network_objects import target

from virtbus.netd.core.address_assignment import replaced
from virtbus.netd.core.cni_results import settled as settled_by_cni
from virtbus.netd.core.dhcp import MessageType, Offer, answer, parse
from virtbus.netd.core.dhcp_offer import DhcpSettings, all_offers, offers_of
from virtbus.netd.core.plan import plan_of
from virtbus.netd.settings import Settings

A = "0192f0c1-2d3e-7abc-8def-00000000000a"
SITE = DhcpSettings(
    dns=(IPv4Address("192.0.2.53"),),
    ntp=(IPv4Address("192.0.2.123"),),
    domain="site.example",
    search=("site.example",),
)


def offered(dns: dict[str, Any], names_domain: str = "") -> Offer:
    """The offer on a CNI network whose result has this `dns`."""
    plan = plan_of(make_record(A, networks=("lan",)))
    result = {"ips": [{"address": "10.9.0.5/24", "gateway": "10.9.0.1"}], "dns": dns}
    nic = settled_by_cni(plan.nics[0], result)
    (offer,) = offers_of(replaced(plan, nic), SITE, names_domain)
    assert offer is not None
    return offer


def test_a_networks_servers_and_domains_replace_those_of_the_node() -> None:
    offer = offered(
        {
            "nameservers": ["10.96.0.10"],
            "domain": "cluster.local",
            "search": ["default.svc.cluster.local", "svc.cluster.local"],
        }
    )
    assert offer.dns == (IPv4Address("10.96.0.10"),)
    assert offer.domain == "cluster.local"
    assert offer.search == ("default.svc.cluster.local", "svc.cluster.local")
    assert offer.ntp == SITE.ntp
    assert offer.hostname == f"vm-{A[:4]}"


def test_a_network_without_dns_gets_that_of_the_node() -> None:
    offer = offered({})
    assert (offer.dns, offer.domain, offer.search) == (SITE.dns, SITE.domain, SITE.search)


def test_a_guest_asks_its_gateway_for_names_and_finds_its_namespace_by_short_names() -> None:
    gateway = IPv4Interface("10.127.0.1/16")
    attachment = settled(plan_of(make_record(A, namespace="shop")), gateway, ())
    (offer,) = offers_of(attachment, SITE, "vm.internal")
    assert offer is not None
    assert offer.dns == (gateway.ip,)
    assert (offer.domain, offer.search) == ("site.example", ("shop.vm.internal", "site.example"))
    (plain,) = offers_of(attachment, DhcpSettings(), "vm.internal")
    assert plain is not None
    assert (plain.domain, plain.search) == ("shop.vm.internal", ("shop.vm.internal",))
    (without,) = offers_of(attachment, SITE)
    assert without is not None
    assert (without.dns, without.search) == (SITE.dns, SITE.search)


OWN = {
    "nameservers": ["10.96.0.10", "fd00:96::a"],
    "searches": ["shop.svc.cluster.local", "svc.cluster.local"],
}


@pytest.mark.parametrize("kind", ["default", "cni", "isolated"])
def test_the_dns_of_a_vm_replaces_that_of_each_kind_of_network(kind: str) -> None:
    isolated = target("isolated", subnet="10.200.0.0/24") if kind == "isolated" else {}
    networks = {"networks": ("default" if kind == "default" else "blue",)}
    record = make_record(A, **(networks | isolated), more_spec={"dns_config": OWN})
    attachment = settled(plan_of(record), IPv4Interface("10.127.0.1/16"), ())
    (nic,) = attachment.nics
    nic = nic.model_copy(update={"dns": ("192.0.2.1",), "search": ("lan",), "domain": "lan"})
    nic = nic.model_copy(update={"addresses": ("10.9.0.5/24", "fd00:127::9/64")})
    (both,) = all_offers(replaced(attachment, nic), SITE, "vm.internal")
    assert both.four is not None
    assert both.six is not None
    assert both.four.dns == (IPv4Address("10.96.0.10"),)
    assert both.four.search == both.six.search == ("shop.svc.cluster.local", "svc.cluster.local")
    assert both.four.domain == "shop.svc.cluster.local"
    assert both.six.dns == (IPv6Address("fd00:96::a"),)


def test_an_empty_dns_of_a_vm_gives_its_guest_none() -> None:
    plan = plan_of(make_record(A, more_spec={"dns_config": {}}))
    (offer,) = offers_of(settled(plan, IPv4Interface("10.127.0.1/16"), ()), SITE, "vm.internal")
    assert offer is not None
    assert (offer.dns, offer.domain, offer.search) == ((), "", ())


def test_a_guest_of_a_cni_network_asks_the_servers_of_its_network() -> None:
    assert offered({}, "vm.internal") == offered({})


def test_names_that_cannot_be_encoded_are_left_out_and_dhcp_answers() -> None:
    bad = ["x" * 64, "a..b", "", ".", "ä.example", "-a.example", "ok.example.", "a" * 254]
    offer = offered({"domain": "x" * 64, "search": bad})
    assert offer.search == ("ok.example",)
    assert offer.domain == SITE.domain
    asked = parse(request(MessageType.DISCOVER, mac=offer.mac))
    assert asked is not None
    assert answer(asked, offer) is not None


@pytest.mark.parametrize("zone", ["VM.internal", "vm.internal.", "a..b", "x" * 64])
def test_a_zone_that_is_no_domain_in_lower_case_is_refused(zone: str) -> None:
    with pytest.raises(ValidationError, match="is no domain name in lower case"):
        Settings(node="n1", zone=zone)


def test_a_search_domain_that_is_none_is_refused_with_its_text() -> None:
    with pytest.raises(ValidationError, match="'a b' is no domain name"):
        Settings(node="n1", search=("example.com", "a b"))
