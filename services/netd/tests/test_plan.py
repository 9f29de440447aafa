"""Names, plans, addresses: functions of the record."""

from ipaddress import IPv4Address, IPv4Interface
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from services.netd.tests.pretended_host import make_record, settled

from virtbus.netd.core import names
from virtbus.netd.core.address_assignment import carried_over
from virtbus.netd.core.attachment import NicKind
from virtbus.netd.core.plan import plan_of
from virtbus.netd.core.subnet import choose_address
from virtbus.netd.core.token_bucket import TokenBucket
from virtbus.netd.edge.host_servers import host_dns
from virtbus.netd.settings import Settings
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.network import check_mac

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
    macs = {names.guest_mac(str(uid), f"net{index}"), names.wire_mac(str(uid), index)}
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
    assert [nic.mac for nic in plan.nics] == ["02:00:00:00:00:07", names.guest_mac(A, "net1")]
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
    used = {f"192.0.2.{number}" for number in taken}
    if len(used) == 13:
        with pytest.raises(VirtbusError):
            choose_address(gateway, key, used)
        return
    address = choose_address(gateway, key, used)
    assert str(address.ip) not in used
    assert address.ip not in {gateway.ip, gateway.network[0], gateway.network[-1]}
    assert address.network == gateway.network


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
