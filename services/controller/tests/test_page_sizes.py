"""Lists, watches and history in bytes: three large VMs cost nobody else anything (ADR 0028)."""

import json
from typing import Any

import msgpack
import pytest
from services.controller.tests.fleets import node, record, status, uid
from services.controller.tests.test_vm_api import played
from services.controller.tests.test_watching import listed
from services.controller.tests.virtual import World, settle

from virtbus.bus.client.codec import pack
from virtbus.bus.client.link import Raw
from virtbus.bus.client.message_format import CONTENT_TYPE, JSON
from virtbus.bus.client.ports import HISTORY_BYTES, StoredMessage
from virtbus.bus.client.requests import data_of
from virtbus.controller.core import history, pages
from virtbus.schemas import subjects
from virtbus.schemas.api import NodePage, VmPage
from virtbus.schemas.history import EventList, EventPage
from virtbus.schemas.vm_status import VmView
from virtbus.schemas.wire import encode, encode_json, validate

MESSAGE_BYTES = 1024 * 1024
LONG = "\x01" * 100_000
"""As JSON six times as long."""


async def put_large(made: World, count: int) -> None:
    """VMs whose records have the maximum size; two of them also have large statuses."""
    for number in range(1, count + 1):
        large = record(number, name=f"vm-{number:03}", annotations={"notes": LONG})
        await made.host.put(subjects.vm_record("n1", large.uid), encode(large))
        if number <= 2:
            await made.say(status(large, message="\x01" * 14_000))
    await settle()


async def raw_answer(made: World, resource: str, verb: str, data: Any, *, as_json: bool) -> Raw:
    headers = {CONTENT_TYPE: JSON} if as_json else {}
    return await made.client._link.ask(
        subjects.api(resource, verb), pack({"data": data}), headers=headers, timeout_s=30
    )


async def every_page(
    made: World, resource: str, verb: str = "list", *, as_json: bool, **query: Any
) -> list[Any]:
    items: list[Any] = []
    more: dict[str, Any] = {}
    while True:
        raw = await raw_answer(made, resource, verb, query | more, as_json=as_json)
        assert len(raw.body) < MESSAGE_BYTES
        page = data_of(raw)
        assert page.get("items"), "a page that says more follows is not empty"
        items += page["items"]
        if not page.get("continue"):
            return items
        more = {"continue": page["continue"]}


@pytest.mark.parametrize("as_json", [True, False])
def test_a_list_of_large_vms_comes_whole_in_pages_that_can_be_sent(*, as_json: bool) -> None:
    @played()
    async def scenario(made: World) -> None:
        await put_large(made, 30)
        found = await every_page(made, "vm", as_json=as_json, limit=500)
        assert [one["uid"] for one in found] == [uid(number) for number in range(1, 31)]
        assert not any(one.get("cut") for one in found)

    scenario()


@played()
async def test_a_list_by_count_is_unchanged(made: World) -> None:
    for number in range(1, 6):
        await made.ask("create", name=f"vm-{number}", image="tiny", uid=uid(number))
    first = validate(VmPage, await made.ask("list", limit=3))
    assert len(first.items) == 3
    more: dict[str, Any] = {"limit": 3, "continue": first.continue_}
    rest = validate(VmPage, await made.ask("list", **more))
    assert ([one.name for one in rest.items], rest.continue_) == (["vm-4", "vm-5"], None)


@played()
async def test_a_watch_of_large_vms_lists_them_all_and_reports_their_changes(made: World) -> None:
    await put_large(made, 30)
    async with made.watch() as replies:
        names, _ = await listed(replies)
        assert len(names) == 30
        await made.say(status(record(3), message="x" * 14_000))
        while True:
            reply = await anext(replies)
            if reply.get("change"):
                assert reply["change"]["uid"] == uid(3)
                break


def test_a_view_that_is_too_large_is_cut_and_names_the_cut_fields() -> None:
    view = VmView.model_validate(
        {
            "uid": uid(1),
            "namespace": "default",
            "name": "web",
            "node": "n1",
            "epoch": 1,
            "generation": 1,
            "revision": 1,
            "created_ns": 1,
            "state": "Running",
            "annotations": {"a": "\x01" * 200_000},
            "message": "\x01" * 10_000,
            "spec": {"node_selector": {}},
        }
    )
    for as_json, cut in ((True, ["annotations"]), (False, [])):
        item, size_bytes = pages.fitting(view, as_json=as_json)
        assert size_bytes <= pages.ITEM_BYTES
        assert list(item.get("cut", ())) == cut
        assert VmView.model_validate(item).name == "web"
    for field in ("labels", "conditions", "interfaces"):
        huge: Any = {"x": "\x01" * 200_000}
        if field != "labels":
            huge = [{"type": "\x01" * 200_000, "status": True, "name": "a", "mac": "b"}]
        grown = VmView.model_validate(view.model_dump() | {"annotations": {}, field: huge})
        item, size_bytes = pages.fitting(grown, as_json=True)
        if field != "interfaces":
            assert item["cut"] == [field]
        assert size_bytes <= pages.ITEM_BYTES
        assert VmView.model_validate(item).uid == uid(1)


@pytest.mark.parametrize("as_json", [True, False])
def test_nodes_images_and_the_status_of_a_large_fleet_can_be_sent(*, as_json: bool) -> None:
    @played()
    async def scenario(made: World) -> None:
        labels = {f"label-{number}": "x" * 200 for number in range(100)}
        for number in range(2, 102):
            await made.hear(node(f"n{number:03}", labels=labels))
        await settle()
        found = await every_page(made, "node", as_json=as_json)
        assert len(found) == 101
        assert len(await every_page(made, "network", "offers", as_json=as_json)) == 1
        raw = await raw_answer(made, "bus", "status", {}, as_json=as_json)
        assert len(raw.body) < MESSAGE_BYTES
        told = data_of(raw)
        assert told.get("unlisted_nodes", 0) == 101 - len(told["nodes"]) > 0

    scenario()


@played()
async def test_a_node_page_by_its_model_still_reads(made: World) -> None:
    page = validate(NodePage, await made.ask("list", resource="node"))
    assert [one.node for one in page.items] == ["n1"]
    assert page.continue_ is None


def fact(sequence: int, body: bytes) -> StoredMessage:
    return StoredMessage("virtbus.evt.n1.u.vm.accepted", body, sequence, 0)


@pytest.mark.parametrize("as_json", [True, False])
def test_history_is_bounded_by_bytes_and_shows_unreadable_events(*, as_json: bool) -> None:
    bodies = [b"\xc1", b"[1]", pack({"data": [1]}), pack({"data": {"spans": 5}})]
    bodies += [pack({"data": {"message": "\x01" * 20_000}})] * 60
    stored = [fact(number, body) for number, body in enumerate(bodies, start=1)]
    seen: list[int] = []
    after: int | None = 0
    while after is not None:
        left = [one for one in stored if one.sequence > after]
        plain = history.page(left, EventList(after=after), more=False, as_json=as_json)
        size_bytes = len((encode_json if as_json else encode)(plain))
        assert size_bytes < MESSAGE_BYTES
        page = EventPage.model_validate(
            json.loads(encode_json(plain)) if as_json else msgpack.unpackb(encode(plain))
        )
        seen += [item.sequence for item in page.items]
        after = page.next_after
    assert seen == list(range(1, 65))


def test_an_event_that_is_too_large_to_show_takes_no_room_of_others() -> None:
    spans: list[Any] = [{}] * 15_000
    bodies = [pack({"data": {}}), pack({"data": {"spans": spans}}), pack({"data": {}})]
    stored = [fact(number, body) for number, body in enumerate(bodies, start=1)]
    page = history.page(stored, EventList(after=0), more=False, as_json=True)
    assert [one["sequence"] for one in page["items"]] == [1, 2, 3]
    assert "too large" in page["items"][1]["data"]["message"]


@played()
async def test_a_history_request_takes_no_more_of_the_bus_than_a_page(made: World) -> None:
    for number in range(40):
        made.host.emit(
            subjects.event("n1", uid(1), "vm.accepted"),
            {"message": "x" * 50_000},
            message_id=str(number),
        )
    await settle()
    stored = await made.client.history(subjects.events(None), limit=1000)
    assert sum(len(one.body) for one in stored) <= HISTORY_BYTES + 51_000
    seen, after = 0, 0
    while True:
        page = validate(EventPage, await made.ask("events", after=after, limit=1000))
        seen += len(page.items)
        if page.next_after is None:
            break
        after = page.next_after
    assert seen == 40
