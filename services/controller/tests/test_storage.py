"""A bus that answers but does not store: writers get an error at once, until it stores again."""

import asyncio

from services.controller.tests.fleets import node, uid
from services.controller.tests.test_vm_api import played, refused
from services.controller.tests.virtual import World, settle

from virtbus.bus.client.memory_bus import Fault
from virtbus.controller.edge.bus_storage import LOOK_S, REPORT_FRESH_S
from virtbus.schemas import subjects
from virtbus.schemas.errors import Retry
from virtbus.schemas.storage import BusStorage

STALLED = BusStorage(stalled=("KV_vm",), low=True, message="the bus stores nothing: free space")
LOW = BusStorage(low=True, message="little is free: delete VMs")


async def tell(made: World, told: BusStorage) -> None:
    await made.client.publish(subjects.bus_storage(), told)
    await settle()


@played()
async def test_an_unanswered_write_reports_the_storage_and_later_ones_fail_at_once(
    made: World,
) -> None:
    made.buses["c1"].faults.extend([Fault.LOST] * 3)  # the claim, and two probes
    first = await refused(made.ask("create", name="web", image="tiny", uid=uid(1)))
    assert (first.code, first.reason, first.body.retry) == (503, "bus_storage", Retry.SAME_ID)
    assert "disk is full" in str(first)
    for verb in ("start", "stop", "delete"):
        again = await refused(made.ask(verb, name="web"))
        assert again.reason == "bus_storage"
    assert not (await made.ask("list")).get("items")
    status = await made.ask("status", resource="bus")
    assert "stores nothing" in status["alarms"][0]


@played()
async def test_it_ends_with_the_first_probe_that_is_stored(made: World) -> None:
    made.buses["c1"].faults.extend([Fault.LOST] * 2)
    await refused(made.ask("create", name="web", image="tiny", uid=uid(1)))
    await asyncio.sleep(2 * LOOK_S)
    await made.ask("create", name="web", image="tiny", uid=uid(1))
    assert not (await made.ask("status", resource="bus")).get("alarms")


@played()
async def test_a_single_lost_answer_stays_an_unknown_outcome(made: World) -> None:
    made.buses["c1"].faults.append(Fault.LOST)
    error = await refused(made.ask("create", name="web", image="tiny", uid=uid(1)))
    assert error.reason == "bus_outcome_unknown"
    await made.ask("create", name="web", image="tiny", uid=uid(1))


@played()
async def test_the_disk_guards_report_stops_creates_and_permits_deletes(made: World) -> None:
    await made.ask("create", name="web", image="tiny", uid=uid(1))
    await tell(made, LOW)
    error = await refused(made.ask("create", name="db", image="tiny"))
    assert (error.code, error.reason, str(error)) == (429, "bus_full", LOW.message)
    await made.ask("create", name="web", image="tiny", uid=uid(1))
    assert (await made.vm("delete", name="web")).deleting


@played()
async def test_the_disk_guards_report_of_a_stall_holds_until_it_is_revoked_or_the_guard_is_silent(
    made: World,
) -> None:
    await tell(made, STALLED)
    assert (await refused(made.ask("create", name="a", image="tiny"))).reason == "bus_storage"
    await tell(made, BusStorage())
    await made.ask("create", name="a", image="tiny")
    await tell(made, STALLED)
    await asyncio.sleep(REPORT_FRESH_S + 1)
    await made.hear(node())
    await settle()
    await made.ask("create", name="b", image="tiny")


@played()
async def test_an_unreadable_storage_report_changes_nothing(made: World) -> None:
    await made.client.publish(subjects.bus_storage(), {"free_bytes": "many"})
    await settle()
    await made.ask("create", name="a", image="tiny")
