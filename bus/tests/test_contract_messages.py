"""Requests, services, core messages and events: the contract of every bus, fake or real."""

import asyncio
from typing import Any

import pytest

from virtbus.bus.client.codec import read_message
from virtbus.bus.client.ports import Bus, Endpoint, Request, ServiceInfo
from virtbus.bus.errors import OutcomeUnknownError, UnavailableError
from virtbus.schemas.api import VmRef
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.events import Event, EventKind

INFO = ServiceInfo("controller", "1.0.0", "tests")
SUBJECT = "virtbus.api.v1.vm.get"
UID = "0192f0c1-2d3e-7abc-8def-0123456789ab"


async def echo(request: Request) -> Any:
    return {"data": request.data, "id": request.id}


async def test_a_request_gets_the_handlers_value_and_carries_its_id(bus: Bus, other: Bus) -> None:
    async with bus.serve(INFO, [Endpoint("get", SUBJECT, echo)]):
        answer = await other.request(SUBJECT, {"a": [1, b"x"]}, timeout_s=5, request_id="op-1")
    assert answer == {"data": {"a": [1, b"x"]}, "id": "op-1"}


async def test_a_model_is_sent_as_its_fields(bus: Bus, other: Bus) -> None:
    async with bus.serve(INFO, [Endpoint("get", SUBJECT, echo)]):
        answer = await other.request(SUBJECT, VmRef(name="web"), timeout_s=5)
    assert answer["data"] == {"name": "web"}


async def test_a_refusal_arrives_as_it_was_raised(bus: Bus, other: Bus) -> None:
    async def refuse(_: Request) -> Any:
        raise VirtbusError(Code.CONFLICT, "name_taken", "choose another name")

    async with bus.serve(INFO, [Endpoint("get", SUBJECT, refuse)]):
        with pytest.raises(VirtbusError, match="choose another name") as caught:
            await other.request(SUBJECT, {}, timeout_s=5)
    assert (caught.value.code, caught.value.reason) == (409, "name_taken")


async def test_a_bug_in_a_handler_is_500_without_its_text(
    bus: Bus, other: Bus, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(_: Request) -> Any:
        raise RuntimeError("the secret is 42")

    async with bus.serve(INFO, [Endpoint("get", SUBJECT, fail)]):
        with pytest.raises(VirtbusError) as caught:
            await other.request(SUBJECT, {}, timeout_s=5)
    assert caught.value.code == 500
    assert "42" not in caught.value.body.model_dump_json()
    assert "the secret is 42" in caplog.text


async def test_an_unavailable_bus_behind_a_handler_is_503(bus: Bus, other: Bus) -> None:
    async def fail(_: Request) -> Any:
        raise UnavailableError("election")

    async with bus.serve(INFO, [Endpoint("get", SUBJECT, fail)]):
        with pytest.raises(VirtbusError) as caught:
            await other.request(SUBJECT, {}, timeout_s=5)
    assert caught.value.code == 503


async def test_a_request_that_nobody_serves_is_unavailable(bus: Bus) -> None:
    with pytest.raises(UnavailableError):
        await bus.request(SUBJECT, {}, timeout_s=0.3)


async def test_a_request_waits_for_a_service_that_starts_late(bus: Bus, other: Bus) -> None:
    async with asyncio.TaskGroup() as group:
        asked = group.create_task(other.request(SUBJECT, {}, timeout_s=10))
        await asyncio.sleep(0.1)  # the first attempts have no receiver
        async with bus.serve(INFO, [Endpoint("get", SUBJECT, echo)]):
            assert (await asked)["data"] == {}


async def test_a_request_without_an_answer_has_an_unknown_outcome(bus: Bus, other: Bus) -> None:
    async def hang(_: Request) -> Any:
        await asyncio.sleep(60)

    async with bus.serve(INFO, [Endpoint("get", SUBJECT, hang)]):
        with pytest.raises(OutcomeUnknownError):
            await other.request(SUBJECT, {}, timeout_s=0.3)


async def test_slow_requests_run_in_parallel_and_the_rest_get_a_retry_time(
    bus: Bus, other: Bus
) -> None:
    running = 0
    most = 0
    go = asyncio.Event()

    async def slow(_: Request) -> Any:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await go.wait()
        running -= 1
        return "done"

    results: list[Any] = []

    async def ask() -> None:
        try:
            results.append(await other.request(SUBJECT, {}, timeout_s=10))
        except VirtbusError as error:
            results.append(error)
            go.set()

    endpoint = Endpoint("get", SUBJECT, slow, limit=4, backlog=3)
    async with bus.serve(INFO, [endpoint]), asyncio.TaskGroup() as group:
        for _ in range(8):
            group.create_task(ask())
    refused = [one for one in results if isinstance(one, VirtbusError)]
    assert most == 4
    assert len(refused) == 1
    assert refused[0].code == 429
    assert refused[0].body.after_ms
    assert results.count("done") == 7


async def test_a_request_whose_time_ran_out_in_the_backlog_is_never_handled(
    bus: Bus, other: Bus
) -> None:
    handled: list[str] = []
    go = asyncio.Event()

    async def slow(request: Request) -> Any:
        handled.append(request.id)
        await go.wait()

    endpoint = Endpoint("get", SUBJECT, slow, limit=1)
    async with bus.serve(INFO, [endpoint]), asyncio.TaskGroup() as group:
        first = group.create_task(other.request(SUBJECT, {}, timeout_s=10, request_id="first"))
        while not handled:
            await asyncio.sleep(0)
        with pytest.raises(OutcomeUnknownError):
            await other.request(SUBJECT, {}, timeout_s=0.2, request_id="late")
        go.set()
        await first
        await other.request(SUBJECT, {}, timeout_s=10, request_id="third")
    assert handled == ["first", "third"]


async def test_without_a_queue_every_instance_gets_the_request(bus: Bus, other: Bus) -> None:
    seen: list[str] = []

    def endpoint(name: str) -> Endpoint:
        async def handle(_: Request) -> Any:
            seen.append(name)
            return name

        return Endpoint("get", SUBJECT, handle, queue=None)

    async with bus.serve(INFO, [endpoint("a")]), other.serve(INFO, [endpoint("b")]):
        await other.request(SUBJECT, {}, timeout_s=5)
        async with asyncio.timeout(5):
            while len(seen) < 2:
                await asyncio.sleep(0)
    assert sorted(seen) == ["a", "b"]


async def test_a_stream_of_replies_arrives_in_order_and_ends_with_the_refusal(
    bus: Bus, other: Bus
) -> None:
    async def many(request: Request) -> Any:
        for number in range(50):
            await request.stream({"n": number})
        raise VirtbusError(Code.GONE, "gone", "start again")

    async with (
        bus.serve(INFO, [Endpoint("watch", SUBJECT, many)]),
        other.request_stream(SUBJECT, {}, idle_timeout_s=5) as replies,
    ):
        items = aiter(replies)
        assert [await anext(items) for _ in range(50)] == [{"n": n} for n in range(50)]
        with pytest.raises(VirtbusError, match="start again"):
            await anext(items)


async def test_a_stream_that_falls_silent_is_unavailable(bus: Bus, other: Bus) -> None:
    async def once(request: Request) -> Any:
        await request.stream({"n": 1})

    async with (
        bus.serve(INFO, [Endpoint("watch", SUBJECT, once)]),
        other.request_stream(SUBJECT, {}, idle_timeout_s=0.2) as replies,
    ):
        assert await anext(aiter(replies)) == {"n": 1}
        with pytest.raises(UnavailableError):
            await anext(aiter(replies))


async def test_a_stream_that_nobody_serves_is_unavailable(other: Bus) -> None:
    async with other.request_stream(SUBJECT, {}, idle_timeout_s=5) as replies:
        with pytest.raises(UnavailableError):
            await anext(aiter(replies))


async def test_published_models_are_read_back(bus: Bus, other: Bus) -> None:
    subject = f"virtbus.node.n1.ready.{UID}.image"
    event = Event(kind=EventKind.IMAGE_READY, uid=UID, node="n1")
    async with bus.subscribe("virtbus.node.n1.ready.>") as messages:
        await other.publish(subject, event)
        async with asyncio.timeout(5):
            message = await anext(aiter(messages))
    assert message.subject == subject
    assert read_message(Event, message) == event
    assert message.headers["Content-Type"] == "application/msgpack"


async def test_facts_are_stored_once_in_order_and_read_page_by_page(bus: Bus, other: Bus) -> None:
    subject = f"virtbus.evt.n1.{UID}.vm.accepted"
    async with other.subscribe("virtbus.evt.>") as messages:
        for number in range(5):
            bus.emit(subject, {"n": number}, message_id=f"id-{number}")
            bus.emit(subject, {"n": number}, message_id=f"id-{number}")
        async with asyncio.timeout(5):
            items = aiter(messages)
            for _ in range(5):
                await anext(items)
        async with asyncio.timeout(5):
            while len(await other.history("virtbus.evt.>")) < 5:
                await asyncio.sleep(0.01)
    page = await other.history(f"virtbus.evt.*.{UID}.>", limit=3)
    rest = await other.history(f"virtbus.evt.*.{UID}.>", after=page[-1].sequence)
    assert len(page) == 3
    assert len(rest) == 2
    assert len({one.sequence for one in page + rest}) == 5


async def test_a_request_brings_its_trace_along(bus: Bus, other: Bus) -> None:
    seen: list[str | None] = []

    async def inner(request: Request) -> Any:
        seen.append(request.traceparent)

    async def outer(_: Request) -> Any:
        await bus.request("virtbus.api.v1.vm.list", {}, timeout_s=5)

    from virtbus.bus.client.tracing import continued

    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    endpoints = [Endpoint("get", SUBJECT, outer), Endpoint("l", "virtbus.api.v1.vm.list", inner)]
    async with bus.serve(INFO, endpoints):
        with continued(parent):
            await other.request(SUBJECT, {}, timeout_s=5)
    assert seen == [parent]
