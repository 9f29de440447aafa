"""The observers of `make chaos` find addresses given twice, and read the rules of groups."""

from collections import Counter
from collections.abc import Sequence

import pytest
from services.controller.tests.fleets import record, uid
from tests.chaos.claims import Claims
from tests.chaos.placed import _rules

from virtbus.bus.client.ports import Entry, EntryKind
from virtbus.schemas.address_claim import AddressClaim, ClaimedAddresses
from virtbus.schemas.subjects import address_claim, vm_record
from virtbus.schemas.wire import encode

NETWORK = uid(9)
ADDRESS = "10.213.0.10"
CLAIM = address_claim(NETWORK, ADDRESS)
LISTING = """table inet virtbus_groups {
\tset nic0-0-4 {
\t\ttype ipv4_addr
\t\telements = { 10.213.0.11,
\t\t\t     10.213.0.10 }
\t}

\tset nic0-0-6 {
\t\ttype ipv6_addr
\t}

\tchain ingress0 {
\t\tct protocol tcp ct original proto-dst 0xf1 [invalid type] jump ingress0-0
\t\tct protocol icmp accept
\t}
}
"""


def claimed(number: int) -> Entry:
    return Entry(CLAIM, encode(AddressClaim(vm=uid(number))), 1)


def recorded(number: int, node: str = "n1", *addresses: str) -> Entry:
    claims = {"lan": ClaimedAddresses(network=NETWORK, addresses=addresses or (ADDRESS,))}
    vm = record(number, node=node, address_claims=claims)
    return Entry(vm_record(node, vm.uid), encode(vm), 1)


def ended(entry: Entry) -> Entry:
    return Entry(entry.key, b"", 2, EntryKind.PURGE)


WHOLE_LIFE = [
    claimed(1),
    recorded(1),
    recorded(1, "n2"),
    ended(recorded(1)),
    ended(recorded(1, "n2")),
    ended(claimed(1)),
    claimed(2),
    recorded(2),
]


@pytest.mark.parametrize(
    ("writes", "wrong"),
    [
        (WHOLE_LIFE, ""),
        ([claimed(1), recorded(1), recorded(2)], f"claimed by {uid(1)}"),
        ([recorded(1)], "claimed by nobody"),
        ([claimed(1), recorded(1), claimed(2)], f"{uid(1)} lost {NETWORK} {ADDRESS}"),
        ([claimed(1), recorded(1), ended(claimed(1))], f"{uid(1)} lost"),
        ([claimed(1), recorded(1), recorded(1, "n2", "10.213.0.11")], "had"),
    ],
)
def test_a_wrong_write_is_found(writes: Sequence[Entry], wrong: str) -> None:
    claims = Claims(_listing=False)
    for entry in writes:
        claims._wrote(entry)
    assert bool(claims.wrong) == bool(wrong)
    assert wrong in "".join(claims.wrong)
    assert wrong or claims.orphans() == []


def test_a_claim_without_a_record_is_an_orphan() -> None:
    claims = Claims(_listing=False)
    claims._wrote(claimed(1))
    assert len(claims.orphans()) == 1


def test_the_rules_of_a_listing() -> None:
    peers = ("10.213.0.10", "10.213.0.11")
    assert _rules(LISTING) == Counter({("ingress", 0xF1, peers): 1})
    assert _rules("") == Counter()
