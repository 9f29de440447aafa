"""The other verbs on VMs against scripted services on a real nats-server."""

import asyncio
import json
import signal
import time
from typing import Any

import pytest
from cli.tests.fakes import UID, Cli, Script, environment, run, start, vm_view

from virtbus.bus.client.ports import Request
from virtbus.schemas.api import VmPage, WatchReply
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.events import Event, EventKind, Span
from virtbus.schemas.history import EventItem, EventPage
from virtbus.schemas.states import VmState

pytestmark = pytest.mark.integration

NOT_FOUND = VirtbusError(Code.NOT_FOUND, "vm_not_found", "there is no VM named web")


def item(sequence: int, data: Any) -> EventItem:
    kind = str(getattr(data, "kind", "trace.span"))
    return EventItem(
        sequence=sequence,
        subject=f"virtbus.evt.n1.{UID}.{kind}",
        time_ns=sequence,
        data=data.model_dump(mode="json"),
    )


def fact(kind: EventKind, at_ns: int, **more: Any) -> Event:
    return Event(kind=kind, uid=UID, node="n1", name="web", at_ns=at_ns, **more)


async def test_get_shows_addresses_and_json_shows_all(script: Script, cli: Cli) -> None:
    script.answer("vm", "get", vm_view())
    ended = await cli("vm", "get", "web")
    assert ended.code == 0, ended.err
    assert "10.77.0.5/16" in ended.out
    assert (await cli("vm", "get", "web", "-o", "json")).json["uid"] == UID
    assert "uid: " + UID in (await cli("vm", "get", "web", "-o", "yaml")).out
    assert script.data("vm.get")[0] == {"name": "web", "namespace": "default"}


async def test_a_uid_given_as_a_name_is_sent_as_a_uid(script: Script, cli: Cli) -> None:
    script.answer("vm", "get", vm_view())
    assert (await cli("vm", "get", UID.upper())).code == 0
    assert script.data("vm.get") == [{"uid": UID}]


async def test_missing_vm_exits_3(script: Script, cli: Cli) -> None:
    script.answer("vm", "get", NOT_FOUND)
    ended = await cli("vm", "get", "web")
    assert (ended.code, ended.err) == (3, "error: there is no VM named web\n")


async def test_list_reads_every_page(script: Script, cli: Cli) -> None:
    async def pages(request: Request) -> VmPage:
        if "continue" not in request.data:
            return VmPage(items=(vm_view(),), **{"continue": "next"})
        assert request.data["continue"] == "next"
        return VmPage(items=(vm_view(name="db", state=VmState.FAILED),))

    script.handlers["vm", "list"] = pages
    ended = await cli("vm", "list")
    assert ended.code == 0, ended.err
    head, *rows = ended.out.splitlines()
    assert head.split()[:4] == ["NAME", "STATE", "NODE", "ADDRESS"]
    assert [row.split()[0] for row in rows] == ["web", "db"]
    names = [one["name"] for one in (await cli("vm", "list", "-o", "json")).json["items"]]
    assert names == ["web", "db"]


async def test_control_characters_of_a_guest_never_reach_the_terminal(
    script: Script, cli: Cli
) -> None:
    script.answer("vm", "get", vm_view(message="\x1b[2Jboo"))
    ended = await cli("vm", "get", "web")
    assert "\x1b" not in ended.out
    assert "\\x1b[2Jboo" in ended.out


async def test_list_watch_prints_changes_until_interrupted(script: Script) -> None:
    await script.see(
        WatchReply(items=(vm_view(state=VmState.STARTING),)),
        WatchReply(synced=True),
        WatchReply(change=vm_view()),
        WatchReply(gone=UID),
    )
    process = await start("vm", "list", "-w", "-o", "json", env=environment(script.files))
    assert process.stdout is not None
    states = [json.loads(await process.stdout.readline())["state"] for _ in range(3)]
    assert states == ["Starting", "Running", "Deleted"]
    process.send_signal(signal.SIGINT)
    await process.communicate()
    assert process.returncode == 130


@pytest.mark.parametrize("last", ["Unmatched", "Deleted"])
async def test_a_watched_vm_without_its_label_is_not_called_deleted(
    script: Script, last: str
) -> None:
    script.answer("vm", "get", vm_view() if last == "Unmatched" else NOT_FOUND)
    await script.see(WatchReply(items=(vm_view(),)), WatchReply(synced=True), WatchReply(gone=UID))
    words = ("vm", "list", "-w", "-l", "a=b", "-o", "json")
    process = await start(*words, env=environment(script.files))
    assert process.stdout is not None
    states = [json.loads(await process.stdout.readline())["state"] for _ in range(2)]
    assert states == ["Running", last]
    process.send_signal(signal.SIGINT)
    await process.communicate()


async def test_delete_waits_until_the_watch_reports_gone(script: Script, cli: Cli) -> None:
    script.answer("vm", "delete", vm_view(state=VmState.DELETING, deleting=True))
    await script.see(
        WatchReply(items=(vm_view(state=VmState.DELETING),)),
        WatchReply(synced=True),
        WatchReply(gone=UID),
    )
    ended = await cli("vm", "delete", "web", "--grace", "0")
    assert (ended.code, ended.out) == (0, "web deleted\n"), ended.err
    assert script.data("vm.delete")[0]["grace_s"] == 0


async def test_a_delete_of_several_continues_after_a_missing_one(script: Script, cli: Cli) -> None:
    async def delete(request: Request) -> Any:
        if request.data["name"] == "a":
            raise NOT_FOUND
        return vm_view(name=request.data["name"])

    script.handlers["vm", "delete"] = delete
    ended = await cli("vm", "delete", "a", "b", "--no-wait")
    assert (ended.code, ended.out) == (3, "b deleting\n")


async def test_stop_waits_for_the_state_of_its_own_generation(script: Script, cli: Cli) -> None:
    script.answer("vm", "stop", vm_view(generation=2))
    await script.see(
        # stopped once before: the node's last status answers an older request
        WatchReply(items=(vm_view(state=VmState.STOPPED, generation=2, observed_generation=1),)),
        WatchReply(synced=True),
        WatchReply(change=vm_view(state=VmState.STOPPED, generation=2, observed_generation=2)),
    )
    ended = await cli("vm", "stop", "web", "--grace", "5", "-o", "json")
    assert ended.code == 0, ended.err
    assert ended.json["observed_generation"] == 2
    assert script.data("vm.stop")[0]["grace_s"] == 5


async def test_events_show_times_since_the_first(script: Script, cli: Cli) -> None:
    script.answer("vm", "get", vm_view())
    facts = (
        item(1, fact(EventKind.VM_ACCEPTED, 1_000_000_000)),
        item(2, fact(EventKind.DOMAIN_STARTED, 1_412_000_000, took_ms=402.0)),
    )
    script.answer("vm", "events", EventPage(items=facts))
    ended = await cli("vm", "events", "web")
    assert ended.code == 0, ended.err
    last = ended.out.splitlines()[-1]
    assert "+0.412s" in last
    assert "domain.started" in last
    assert "402 ms" in last


async def test_events_of_a_deleted_vm_are_found_by_its_name(script: Script, cli: Cli) -> None:
    script.answer("vm", "get", NOT_FOUND)
    script.answer("vm", "events", EventPage(items=(item(1, fact(EventKind.VM_DELETED, 5)),)))
    ended = await cli("vm", "events", "web")
    assert ended.code == 0, ended.err
    assert "vm.deleted" in ended.out
    assert script.data("vm.events")[-1]["uid"] == UID


async def test_events_of_a_deleted_vm_are_not_those_of_a_volume_with_its_name(
    script: Script, cli: Cli
) -> None:
    script.answer("vm", "get", NOT_FOUND)
    volume = fact(EventKind.VOLUME_CREATED, 6).model_copy(update={"uid": UID[::-1]})
    items = (item(1, fact(EventKind.VM_DELETED, 5)), item(2, volume))
    script.answer("vm", "events", EventPage(items=items))
    assert (await cli("vm", "events", "web")).code == 0
    assert script.data("vm.events")[-1]["uid"] == UID


async def test_following_events_shows_stored_and_new_ones_once(script: Script) -> None:
    script.answer("vm", "get", vm_view())
    script.answer("vm", "events", EventPage(items=(item(1, fact(EventKind.VM_ACCEPTED, 5)),)))
    process = await start("vm", "events", "web", "-f", "-o", "json", env=environment(script.files))
    assert process.stdout is not None
    first = json.loads(await process.stdout.readline())
    spans = {"spans": [{"trace_id": "t", "span_id": "s", "name": "define"}]}
    await script.node.publish(f"virtbus.evt.n1.{UID}.trace.span", spans)
    await script.happen(EventKind.DOMAIN_STARTED, at_ns=9)
    second = json.loads(await process.stdout.readline())
    assert [one["data"]["kind"] for one in (first, second)] == ["vm.accepted", "domain.started"]
    process.send_signal(signal.SIGINT)
    await process.communicate()


async def test_trace_draws_children_below_their_parents(script: Script, cli: Cli) -> None:
    script.answer("vm", "get", vm_view())

    def span(span_id: str, parent: str, name: str, start_ms: int, end_ms: int) -> Span:
        return Span(
            trace_id="t",
            span_id=span_id,
            parent_id=parent,
            name=name,
            service="s",
            start_ns=start_ms * 1_000_000,
            end_ns=end_ms * 1_000_000,
        )

    spans = [span("c", "b", "define", 20, 30), span("a", "", "vm create", 0, 100)]
    spans.append(span("b", "a", "start", 10, 90))
    items = tuple(item(n, one) for n, one in enumerate(spans, start=1))
    script.answer("vm", "events", EventPage(items=items))
    ended = await cli("vm", "trace", "web")
    assert ended.code == 0, ended.err
    steps = [line.split("  s  ")[0].rstrip() for line in ended.out.splitlines()[2:]]
    assert steps == ["vm create", "└─ start", "   └─ define"]
    assert not ended.err
    assert script.data("vm.events")[0]["spans"] is True


async def test_no_controller_is_unavailable_exit_5(script: Script) -> None:
    env = environment(script.files)
    async with asyncio.timeout(15):
        ended = await run("vm", "list", env=env | {"VIRTBUS_CREDS": "/nonexistent/creds"})
    assert ended.code == 5
    assert "virtbus up" in ended.err


async def test_events_are_in_the_order_of_their_time(script: Script, cli: Cli) -> None:
    script.answer("vm", "get", vm_view())
    late, early = (
        fact(EventKind.IMAGE_PULLING, 2_000_000_000),
        fact(EventKind.VM_ACCEPTED, 1_000_000_000),
    )
    script.answer("vm", "events", EventPage(items=(item(1, late), item(2, early))))
    lines = (await cli("vm", "events", "web")).out.splitlines()
    assert [line.split()[1:3] for line in lines[1:]] == [
        ["+0.000s", "vm.accepted"],
        ["+1.000s", "image.pulling"],
    ]


async def test_events_of_all_are_one_json_value_and_name_each_vm(script: Script, cli: Cli) -> None:
    now = time.time_ns()
    nameless = fact(EventKind.DISKS_RELEASED, now).model_copy(update={"name": ""})
    items = (item(1, fact(EventKind.VM_DELETING, now - 1)), item(2, nameless))
    script.answer("vm", "events", EventPage(items=items))
    assert len((await cli("events", "-o", "json")).json["items"]) == 2
    lines = (await cli("events")).out.splitlines()
    assert [line.split()[0] for line in lines] == ["VM", "web", "web"]


async def test_trace_shows_the_creation_without_later_work(script: Script, cli: Cli) -> None:
    second = 1_000_000_000

    def span(span_id: str, name: str, start_s: int) -> Span:
        start_ns = start_s * second
        return Span(
            trace_id="t" * 32,
            span_id=span_id,
            name=name,
            service="x",
            start_ns=start_ns,
            end_ns=start_ns + 1000,
        )

    spans = (span("a", "virtbus start domain", 1), span("b", "attach network", 200))
    items = tuple(item(n, one) for n, one in enumerate(spans, 1))
    script.answer("vm", "get", vm_view())
    script.answer("vm", "events", EventPage(items=items))
    ended = await cli("vm", "trace", "web")
    assert "attach network" not in ended.out
    assert "the steps that created it are not stored" in ended.err
    assert "attach network" in (await cli("vm", "trace", "web", "--all")).out


async def test_delete_of_several_names_the_vm_of_each_step(script: Script, cli: Cli) -> None:
    other = UID[:-1] + "c"
    views = {"web": vm_view(), "b": vm_view(uid=other, name="b")}

    async def delete(request: Request) -> Any:
        return views[request.data["name"]]

    script.handlers["vm", "delete"] = delete
    await script.see(WatchReply(items=tuple(views.values())), WatchReply(synced=True))
    process = await start("vm", "delete", "web", "b", env=environment(script.files))
    async with asyncio.timeout(20):
        while not script.data("vm.watch"):
            await asyncio.sleep(0.02)
    await script.happen(EventKind.DOMAIN_STOPPING, message="grace 30 s")
    await script.see(WatchReply(gone=UID), WatchReply(gone=other))
    _, err = await process.communicate()
    assert process.returncode == 0, err
    assert b"web  domain.stopping     grace 30 s" in err
