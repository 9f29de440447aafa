"""UsedNics knows what interfaces use while VMs come, change, are planned and go."""

import pytest
from services.netd.tests.pretended_host import make_record

from virtbus.netd.core.attachment import Nic
from virtbus.netd.core.plan import plan_of
from virtbus.netd.core.used_nics import UsedNics

A, B = "01890a5d-ac96-774b-bcce-b302099a8057", "01890a5d-ac96-774b-bcce-b302099a8058"


def nic(uid: str, *addresses: str) -> Nic:
    (found,) = plan_of(make_record(uid)).nics
    return found.model_copy(update={"addresses": addresses})


def refused(used: UsedNics, one: Nic) -> None:
    with used.without(A) as others:
        assert others.ports(one) == 0
        others.put(A, [nic(A, "10.0.0.7/24")])
        raise LookupError


def test_it_counts_what_each_vm_has_now() -> None:
    used = UsedNics()
    one, two = nic(A, "10.0.0.2/24"), nic(B, "10.0.0.3/24")
    used.put(A, [one])
    used.put(B, [two])
    assert (used.ports(one), set(used.addresses(one))) == (2, {"10.0.0.2", "10.0.0.3"})
    assert used.has_mac(one.mac, but=B)
    assert not used.has_mac(one.mac, but=A)
    assert list(used.on_host_link(one.host_place)) == [one, two]
    used.put(A, [nic(A, "10.0.0.9/24")])
    assert set(used.addresses(one)) == {"10.0.0.9", "10.0.0.3"}
    used.drop(A)
    used.drop(A)
    assert (used.ports(one), set(used.addresses(one))) == (1, {"10.0.0.3"})
    used.drop(B)
    assert not any((used.ports(one), used.addresses(one), used.on_host_link(one.host_place)))


def test_a_vm_that_is_planned_is_left_out_and_is_back_after_a_refusal() -> None:
    used = UsedNics()
    one = nic(A, "10.0.0.2/24")
    used.put(A, [one])
    with pytest.raises(LookupError):
        refused(used, one)
    assert set(used.addresses(one)) == {"10.0.0.2"}
    with used.without(B):
        pass
    assert used.ports(one) == 1
