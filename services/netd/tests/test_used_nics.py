"""UsedNics knows what interfaces use while VMs come, change, are planned and go."""

from collections.abc import Iterable
from ipaddress import IPv4Interface
from pathlib import Path

import pytest
from services.netd.tests.pretended_host import make_record

from virtbus.netd.core.address_assignment import addressed
from virtbus.netd.core.attachment import Nic
from virtbus.netd.core.freed_addresses import PER_NETWORK, Freed
from virtbus.netd.core.plan import plan_of
from virtbus.netd.core.used_nics import UsedNics
from virtbus.netd.edge.release_journal import MOST, ReleaseJournal

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


class Stored:
    """A journal in memory."""

    def __init__(self) -> None:
        self.found: list[Freed] = []

    def append(self, releases: Iterable[Freed]) -> None:
        self.found += releases

    def all(self) -> list[Freed]:
        return self.found


def test_released_addresses_are_in_the_order_of_their_releases_also_after_a_restart() -> None:
    journal = Stored()
    used = UsedNics(journal)
    one, two = nic(A, "10.0.0.2/24", "fd00::2/64"), nic(B, "10.0.0.3/24")
    used.put(A, [one])
    with pytest.raises(LookupError):
        refused(used, one)
    used.put(B, [two])
    assert used.freed(one) == {}  # a plan releases nothing
    used.drop(B)
    used.put(A, [nic(A, "10.0.0.9/24")])
    again = UsedNics(journal)
    again.recall()
    for each in (used, again):
        assert list(each.freed(one)) == ["10.0.0.3", "10.0.0.2", "fd00::2"]
        assert each.remembered(nic(B), B).addresses == ("10.0.0.3/24",)
        assert each.remembered(one, A) == one
        assert each.remembered(nic(A), "another").addresses == ()
    used.put(B, [two])
    used.drop(B)
    assert list(used.freed(one)) == ["10.0.0.2", "fd00::2", "10.0.0.3"]
    for number in range(PER_NETWORK):
        used.put(B, [nic(B, f"10.1.{number // 250}.{number % 250}/8")])
    assert len(used.freed(one)) == PER_NETWORK


def test_a_journal_is_cut_and_a_damaged_line_left_out(tmp_path: Path) -> None:
    path = tmp_path / "releases"
    journal = ReleaseJournal(path)
    assert journal.all() == []
    for number in range(2 * MOST + 1):
        journal.append([Freed("bridge ", A, f"10.0.0.{number}")])
    assert len(path.read_text().splitlines()) == MOST
    with path.open("ab") as file:
        file.write(b'\xff"[1, 2]\n{}\n["bridge ", "x", "10.0.0.1/24"]\n["torn')
    found = ReleaseJournal(path).all()
    assert found[-1] == Freed("bridge ", "x", "10.0.0.1/24")
    assert len(found) == MOST - 3


def test_a_journal_is_cut_at_its_limit_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "releases"
    one = Freed("bridge ", A, "10.0.0.2")
    ReleaseJournal(path).append([one] * 2 * MOST)
    journal = ReleaseJournal(path)
    assert len(journal.all()) == MOST
    journal.append([one])
    assert len(path.read_text().splitlines()) == MOST
    journal.append([one] * MOST)
    assert len(path.read_text().splitlines()) == 2 * MOST


def test_an_address_is_free_although_its_release_cannot_be_stored(tmp_path: Path) -> None:
    used = UsedNics(ReleaseJournal(tmp_path / "missing" / "releases"))
    one = nic(A, "10.0.0.2/24")
    used.put(A, [one])
    used.drop(A)
    assert set(used.addresses(one)) == set()
    assert list(used.freed(one)) == ["10.0.0.2"]


def test_an_interface_gets_the_address_again_that_it_had_last() -> None:
    used = UsedNics()
    for address in ("10.0.0.5/24", "10.0.0.9/24"):
        used.put(A, [nic(A, address)])
    used.drop(A)
    planned = used.remembered(nic(A), A)
    gateway = IPv4Interface("10.0.0.1/24")
    assert addressed(planned, A, [gateway], set()).addresses == ("10.0.0.9/24",)
