"""Names, plans, addresses: functions of the record."""

from ipaddress import IPv4Address, IPv4Interface
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from services.netd.tests.pretended_host import make_record, settled

from virtbus.netd.core import names
from virtbus.netd.core.address_assignment import carried_over
from virtbus.netd.core.attachment import Attachment, NicKind
from virtbus.netd.core.plan import plan_of
from virtbus.netd.core.subnet import choose_address
from virtbus.netd.core.token_bucket import TokenBucket
from virtbus.netd.edge.host_servers import host_dns
from virtbus.netd.settings import Settings
from virtbus.schemas.address_claim import ClaimedAddresses
from virtbus.schemas.address_pool import pool_of
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.network import check_mac, guest_mac
from virtbus.schemas.network_object import NetworkKind, NetworkSpec, NetworkTarget, PoolScope
from virtbus.schemas.vm import VmRecord

A = "0192f0c1-2d3e-7abc-8def-00000000000a"
B = "0192f0c1-2d3e-7abc-8def-00000000000b"
GATEWAY = IPv4Interface("10.127.0.1/16")


@given(st.uuids(), st.integers(0, 7))
def test_every_name_fits_the_kernel_and_every_mac_is_a_guests(uid: object, index: int) -> None:
    link = names.host_link(str(uid), index)
    assert len(link.encode()) == 15
    assert names.is_host_link(link)
    lent = names.lent_tap(str(uid), index)
    assert len(lent.encode()) == 15
    assert not names.is_host_link(lent)
    macs = {guest_mac(str(uid), f"net{index}"), names.wire_mac(str(uid), index)}
    assert len(macs) == 2
    for mac in macs:
        assert check_mac(mac) == mac
        assert mac.startswith("02:")
    assert names.uid_of_netns(names.netns(str(uid))) == str(uid)


@pytest.mark.parametrize("name", ["vb-x", "cni-1234", f"vb-{A}x", f"vb-{A.upper()}", "vb-"])
def test_a_foreign_namespace_is_not_ours(name: str) -> None:
    assert names.uid_of_netns(name) is None


def test_uids_that_share_their_beginning_have_other_links() -> None:
    assert names.host_link(A, 0) != names.host_link(B, 0)


def test_a_plan_uses_the_specs_mac_and_generates_the_others() -> None:
    record = make_record(A, networks=("default", "lan"), macs=("02:00:00:00:00:07", None))
    plan = plan_of(record)
    assert [nic.kind for nic in plan.nics] == [NicKind.BRIDGE, NicKind.CNI]
    assert [nic.mac for nic in plan.nics] == ["02:00:00:00:00:07", guest_mac(A, "net1")]
    assert plan == plan_of(record)


def test_a_mac_twice_in_one_vm_is_refused_with_its_path() -> None:
    mac = "02:00:00:00:00:07"
    with pytest.raises(VirtbusError) as refused:
        plan_of(make_record(A, networks=("default", "default"), macs=(mac, mac)))
    path = "spec.domain.devices.interfaces[1].mac_address"
    assert [detail.path for detail in refused.value.body.details] == [path]


def test_an_interface_without_its_network_is_refused_with_its_path() -> None:
    record = make_record(A)
    spec = record.spec.model_copy(update={"networks": ()})
    with pytest.raises(VirtbusError, match=r"interfaces\[0\].name"):
        plan_of(record.model_copy(update={"spec": spec}))


@given(st.sets(st.integers(2, 14)), st.text(max_size=8))
def test_a_chosen_address_is_free_and_in_the_subnet(taken: set[int], key: str) -> None:
    gateway = IPv4Interface("192.0.2.1/28")
    pool = pool_of(gateway.network, gateway.ip)
    used = {f"192.0.2.{number}" for number in taken}
    (nic,) = plan_of(make_record(A)).nics
    if len(used) == 13:
        with pytest.raises(VirtbusError) as refused:
            choose_address(pool, nic, key, used, {})
        assert [one.path for one in refused.value.body.details] == ["spec.networks[0].network"]
        return
    address = choose_address(pool, nic, key, used, {})
    assert str(address) not in used
    assert address not in {gateway.ip, gateway.network[0], gateway.network[-1]}
    assert address in gateway.network


def test_an_address_is_kept_unless_the_subnet_changed_or_another_has_it() -> None:
    plan = plan_of(make_record(A))
    first = settled(plan, GATEWAY, ())
    kept = settled(carried_over(plan, first, ()), GATEWAY, ())
    assert kept == first
    other = IPv4Interface("10.9.0.1/24")
    moved = settled(carried_over(plan, first, ()), other, ())
    assert IPv4Interface(moved.nics[0].addresses[0]).network == other.network
    mine = str(IPv4Interface(first.nics[0].addresses[0]).ip)
    again = settled(carried_over(plan, first, ()), GATEWAY, {mine})
    assert again.nics[0].addresses != first.nics[0].addresses


def on_network(record: VmRecord, *asked: str, **fields: Any) -> Attachment:
    """Return the plan of a VM whose interface asks for addresses on a network of its hosts."""
    spec = NetworkSpec(kind=NetworkKind.ISOLATED, subnet="10.9.0.0/24", **fields)
    target = NetworkTarget(uid=B, namespace="default", name="blue", spec=spec)
    claims = {"net0": ClaimedAddresses(network=B, addresses=asked)} if asked else {}
    more = {"network_targets": {"blue": target}, "address_claims": claims}
    return plan_of(record.model_copy(update=more))


def test_the_addresses_of_the_record_are_given_and_checked_on_the_host() -> None:
    nics = ({"addresses": ["10.9.0.7", "10.9.0.8"]},)
    static = make_record(A, networks=("blue",), nics=nics)
    gateway = IPv4Interface("10.9.0.1/24")
    plan = on_network(static)
    assert settled(plan, gateway).nics[0].addresses == ("10.9.0.7/24", "10.9.0.8/24")
    with pytest.raises(VirtbusError, match=r"has 10\.9\.0\.8"):
        settled(plan, gateway, {"10.9.0.8"})
    with pytest.raises(VirtbusError, match=r"without 10\.9\.0\.7"):
        settled(plan, IPv4Interface("10.8.0.1/24"))


def test_claimed_addresses_replace_those_of_an_earlier_start() -> None:
    fleet: dict[str, Any] = {"pool": PoolScope.FLEET}
    record = make_record(A, networks=("blue",))
    gateway = IPv4Interface("10.9.0.1/24")
    first = settled(on_network(record, "10.9.0.7", **fleet), gateway)
    again = settled(carried_over(on_network(record, "10.9.0.9", **fleet), first, ()), gateway)
    assert [one.nics[0].addresses for one in (first, again)] == [("10.9.0.7/24",), ("10.9.0.9/24",)]
    with pytest.raises(VirtbusError, match="no claimed address on 'blue'"):
        on_network(record, **fleet)


def test_a_host_chooses_within_the_ranges_of_a_network() -> None:
    ranges = {"ranges": ("10.9.0.20-10.9.0.21",), "excluded": ("10.9.0.20",)}
    plan = on_network(make_record(A, networks=("blue",)), **ranges)
    gateway = IPv4Interface("10.9.0.1/24")
    assert settled(plan, gateway).nics[0].addresses == ("10.9.0.21/24",)
    with pytest.raises(VirtbusError, match="all 1 addresses"):
        settled(plan, gateway, {"10.9.0.21"})


def test_a_bucket_gives_its_burst_then_its_rate() -> None:
    bucket = TokenBucket(10.0, 3)
    assert [bucket.take(0.0) for _ in range(4)] == [0.0, 0.0, 0.0, pytest.approx(0.1)]
    assert bucket.take(0.1) == pytest.approx(0.0)
    assert [bucket.take(99.0) for _ in range(4)].count(0.0) == 3


@pytest.mark.parametrize("subnet", ["10.0.0.1/30", "10.0.0.0/24", "10.0.0.255/24", "fe80::1/64"])
def test_a_subnet_that_cannot_serve_is_refused(subnet: str) -> None:
    with pytest.raises(ValidationError):
        Settings(node="n1", subnet=subnet)


def test_a_dns_stub_on_loopback_is_not_offered_to_guests(tmp_path: Path) -> None:
    path = tmp_path / "resolv.conf"
    path.write_text(
        "# x\nnameserver 127.0.0.53\nnameserver 192.0.2.5\nnameserver fe80::1\nsearch a\n"
    )
    assert host_dns(path) == (IPv4Address("192.0.2.5"),)
    assert host_dns(tmp_path / "none") == ()
