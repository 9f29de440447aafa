"""A controller's memory of others' data has a bound (L6)."""

from services.controller.tests.fleets import record, status, uid

from virtbus.controller.core.fleet import Fleet
from virtbus.schemas import subjects
from virtbus.schemas.wire import encode


def told(fleet: Fleet, number: int) -> None:
    one = status(record(number), refused=True)
    fleet.put_status(subjects.vm_status("n1", one.uid), encode(one), number)


def test_a_node_that_refuses_vms_that_nobody_has_is_not_remembered() -> None:
    fleet = Fleet()
    for number in range(1, 1000):
        told(fleet, number)
    assert fleet.refused == {}
    mine = record(5)
    fleet.put_vm(subjects.vm_record("n1", mine.uid), encode(mine), 2000, 0)
    told(fleet, 5)
    assert list(fleet.refused) == [uid(5)]
