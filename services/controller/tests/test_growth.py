"""What a controller remembers of others' words has a bound (L6)."""

from services.controller.tests.fleets import record, status, uid
from services.controller.tests.test_vm_api import played
from services.controller.tests.virtual import World, settle

from virtbus.controller.core.fleet import Fleet
from virtbus.controller.edge.feeds import BAD_KEPT
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


@played()
async def test_unreadable_values_are_remembered_up_to_a_bound_and_until_they_are_good(
    made: World,
) -> None:
    feeds = made.controllers["c1"]._feeds
    for number in range(1, BAD_KEPT + 100):
        await made.host.put(subjects.vm_status("n1", uid(number)), b"\xc1")
        await settle()
    assert len(feeds._bad) == BAD_KEPT
    last = record(BAD_KEPT + 99)
    key = subjects.vm_status("n1", last.uid)
    assert key in feeds._bad
    await made.say(status(last))
    await settle()
    assert key not in feeds._bad
