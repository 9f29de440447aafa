"""VMs of a host by name and address, and the limits of their queries."""

from ipaddress import IPv4Address, IPv4Interface
from unittest.mock import AsyncMock, MagicMock

import dns.message
from services.netd.tests.pretended_host import make_record, settled

from virtbus.netd.core.guest_names import GuestNames, NamedVm
from virtbus.netd.core.named_vm import vm_of
from virtbus.netd.core.plan import plan_of
from virtbus.netd.core.query_limits import (
    BURST,
    BUSY,
    BUSY_WHEN_FULL,
    LOOKUP_BURST,
    QueryLimits,
)
from virtbus.netd.core.resolver_messages import FoundName, ResolverSite
from virtbus.netd.resolver import Resolver

A = "0192f0c1-2d3e-7abc-8def-00000000000a"
B = "0192f0c1-2d3e-7abc-8def-00000000000b"


def vm(uid: str, *addresses: str) -> NamedVm:
    return NamedVm(uid, "shop", "web", tuple(map(IPv4Address, addresses)), ())


def test_the_younger_of_two_vms_has_the_name() -> None:
    names = GuestNames()
    for uid, address in ((B, "10.127.0.6"), (A, "10.127.0.5")):
        names.put(vm(uid, address))
    assert names.named("shop", "web") == vm(B, "10.127.0.6")
    assert names.remove(B) == (IPv4Address("10.127.0.6"),)
    assert names.named("shop", "web") == vm(A, "10.127.0.5")
    assert names.named("bank", "web") is None


def test_an_address_that_another_vm_got_stays_with_it() -> None:
    names = GuestNames()
    names.put(vm(A, "10.127.0.5"))
    names.put(vm(B, "10.127.0.5"))
    names.remove(A)
    assert names.at(IPv4Address("10.127.0.5")) == vm(B, "10.127.0.5")
    names.put(vm(B))
    assert names.at(IPv4Address("10.127.0.5")) is None


def test_guests_of_a_host_get_the_address_on_the_network_that_they_share() -> None:
    plan = plan_of(make_record(A, networks=("default", "lan"), namespace="shop", name="web"))
    gateway = IPv4Interface("10.127.0.1/16")
    attachment = settled(plan, gateway, ())
    both = vm_of(attachment)
    assert both.addresses == both.built_in == (IPv4Interface(attachment.nics[0].addresses[0]).ip,)
    lan = attachment.nics[1].model_copy(update={"addresses": ("10.9.0.5/24",)})
    only = vm_of(attachment.model_copy(update={"nics": (lan,)}))
    assert only.addresses == (IPv4Address("10.9.0.5"),)


def test_a_guest_has_a_rate_and_few_open_queries_when_all_have_many() -> None:
    limits = QueryLimits()
    assert sum(limits.wait_s(0.0) == 0.0 for _ in range(2 * BURST)) == BURST
    assert sum(limits.may_look_up(0.0) for _ in range(100)) == LOOKUP_BURST
    limits.busy = BUSY_WHEN_FULL
    assert limits.is_full(crowded=True)
    assert not limits.is_full(crowded=False)
    limits.busy = BUSY
    assert limits.is_full(crowded=False)


async def test_an_address_has_a_name_for_each_guest_that_finds_the_address_by_this_name() -> None:
    site = ResolverSite("1", "1", "n1", "vm.internal", "10.127.0.1/16", "", (), "")
    other = FoundName(True, "n2", "shop", "far", ("100.64.0.5",))
    resolver = Resolver(site, MagicMock(find=AsyncMock(return_value=other)))
    for uid, namespace, address in ((A, "shop", "10.127.0.5"), (B, "bank", "10.127.0.6")):
        built_in = (IPv4Address(address),)
        resolver._guests.put(NamedVm(uid, namespace, "web", built_in, (), sharing=("net",)))

    async def name_of(address: str) -> str:
        query = dns.message.make_query(IPv4Address(address).reverse_pointer, "PTR")
        guest = MagicMock(address=IPv4Address("10.127.0.5"))
        answer = await resolver._resolve(guest, query.to_wire(), tcp=False)
        assert answer is not None
        return str(dns.message.from_wire(answer).answer[0][0])

    assert await name_of("10.127.0.6") == "web.bank.vm.internal."
    assert await name_of("100.64.0.5") == "far.shop.vm.internal."
