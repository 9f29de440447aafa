"""`vm.events` reports each node's stored events once, and never under another node."""

from services.controller.tests.fleets import uid
from services.controller.tests.virtual import World, run, world

from virtbus.bus.client.memory_bus import MemoryBus
from virtbus.bus.client.ports import StoredMessage
from virtbus.schemas import subjects


def test_a_step_reported_by_two_processes_is_one_event_of_its_own_node() -> None:
    async def scenario(made: World) -> None:
        for name, node in (("a", "n1"), ("b", "n2"), ("c", "n2")):
            bus = MemoryBus(made.server, name)
            subject = subjects.event(node, uid(1), "vm.deleted")
            bus.emit(subject, {"kind": "vm.deleted"}, message_id="foretold")
            bus.emit(subject, {"kind": "vm.deleted"}, message_id="foretold")
        page = await made.ask("events", uid=uid(1))
        assert [one["subject"].split(".")[2] for one in page["items"]] == ["n1", "n2"]

    async def body() -> None:
        async with world() as made:
            await scenario(made)

    run(body)


def test_an_unreadable_event_hides_no_other() -> None:
    async def body() -> None:
        async with world() as made:
            subject = subjects.event("n1", uid(1), "vm.deleted")
            kept = made.server.stored.setdefault("EVT", [])
            for data in (b"\xc1", b"\x01", b"\x81\xa4data\x01", b"\x81\xa5spans\x01"):
                kept.append(StoredMessage(subject, data, len(kept) + 1, 0))
            made.client.emit(subject, {"kind": "vm.deleted"}, message_id="good")
            page = await made.ask("events", uid=uid(1))
            assert [one["data"] for one in page["items"] if "data" in one][-1] == {
                "kind": "vm.deleted"
            }

    run(body)
