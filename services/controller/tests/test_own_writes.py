"""The echo of a record that is being written is known without decoding."""

from contextlib import ExitStack

from services.controller.tests.fleets import record, uid

from virtbus.bus.client.signing import Signer
from virtbus.controller.core.fleet import Fleet
from virtbus.schemas import subjects
from virtbus.schemas.vm import VmRecord
from virtbus.schemas.wire import encode

SIGNER = Signer(b"k" * 32)
OURS = record(1, "web")
KEY = subjects.vm_record(OURS.node, OURS.uid)


def stored(one: VmRecord) -> bytes:
    """Return a record's bytes as the bus stores them."""
    return SIGNER.signed(one.node, one.uid, encode(one))


def test_the_echo_of_a_write_is_the_record_itself() -> None:
    fleet = Fleet()
    with fleet.own_writes.writing(KEY, encode(OURS), OURS):
        assert fleet.put_vm(KEY, stored(OURS), 7, 0) == uid(1)
    assert fleet.vms[uid(1)].record is OURS
    assert fleet.vms[uid(1)].revision == 7


def test_a_record_that_another_controller_wrote_meanwhile_is_read() -> None:
    fleet, theirs = Fleet(), OURS.model_copy(update={"labels": {"by": "another"}})
    with fleet.own_writes.writing(KEY, encode(OURS), OURS):
        fleet.put_vm(KEY, stored(theirs), 7, 0)
    assert fleet.vms[uid(1)].record.labels == {"by": "another"}


def test_a_write_that_ended_is_forgotten_and_a_later_one_is_not() -> None:
    writes, later = Fleet().own_writes, OURS.model_copy(update={"generation": 2})
    with ExitStack() as first, ExitStack() as second:
        first.enter_context(writes.writing(KEY, encode(OURS), OURS))
        second.enter_context(writes.writing(KEY, encode(later), later))
        first.close()
        assert writes.record_of(KEY, stored(later)) is later
        second.close()
        assert writes.record_of(KEY, stored(later)) is None
