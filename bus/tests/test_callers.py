"""The requester's account, as a real server adds it, and each account's share (ADR 0028)."""

import asyncio
import json
from typing import Any

import pytest
from bus.tests.strangers import listening, stranger

from virtbus.bus.client.connection import connect
from virtbus.bus.client.nats_bus import NatsBus
from virtbus.bus.client.owners import REQUEST_INFO, account_of
from virtbus.bus.client.ports import HISTORY_BYTES, Endpoint, Message, Request, ServiceInfo
from virtbus.bus.errors import UnavailableError
from virtbus.bus.provisioning.server import Server
from virtbus.schemas.errors import VirtbusError

pytestmark = pytest.mark.integration

INFO = ServiceInfo("controller", "1.0.0", "tests")
WATCH = "virtbus.api.v1.vm.watch"
GET = "virtbus.api.v1.vm.get"


async def test_a_request_has_its_real_account_with_any_forged_headers(
    nats: Server, controller: NatsBus
) -> None:
    async def who(request: Request) -> Any:
        return request.account

    async with controller.serve(INFO, [Endpoint("get", GET, who)]):
        for user, account in (("client", "CLIENT"), ("observer", "OBSERVER"), ("controller", "")):
            async with connect(nats.settings(user), name=user) as bus:
                assert await bus.request(GET, {}, timeout_s=5) == account
        async with connect(nats.settings("observer"), name="liar") as bus:
            claims = {REQUEST_INFO: json.dumps({"acc": "CLIENT"})}
            raw = await bus._link.ask(GET, b"", headers=claims, timeout_s=5)
            assert b"OBSERVER" in raw.body


async def test_one_account_cannot_hold_all_watches(nats: Server, controller: NatsBus) -> None:
    begun: list[str] = []
    go = asyncio.Event()

    async def watch(request: Request) -> None:
        begun.append(request.account)
        await request.stream({"beat": True})
        await go.wait()

    async def hold(bus: NatsBus) -> str:
        try:
            async with bus.request_stream(WATCH, {}, idle_timeout_s=5) as replies:
                await anext(replies)
                await go.wait()
        except VirtbusError as error:
            return error.reason
        return "held"

    endpoint = Endpoint("watch", WATCH, watch, limit=16, backlog=0)
    async with (
        controller.serve(INFO, [endpoint]),
        connect(nats.settings("observer"), name="observer") as observer,
        connect(nats.settings("client"), name="client") as client,
        asyncio.TaskGroup() as group,
    ):
        greedy = [group.create_task(hold(observer)) for _ in range(40)]
        while len(begun) < 12:
            await asyncio.sleep(0.01)
        modest = [group.create_task(hold(client)) for _ in range(2)]
        while begun.count("CLIENT") < 2:
            await asyncio.sleep(0.01)
        while sum(task.done() for task in greedy) < 28:
            await asyncio.sleep(0.01)
        go.set()
    assert begun.count("OBSERVER") == 12
    assert [task.result() for task in modest] == ["held", "held"]
    assert {task.result() for task in greedy if task.result() != "held"} == {"busy"}


async def test_a_message_to_the_controllers_tells_its_account(
    nats: Server, controller: NatsBus
) -> None:
    subject = "virtbus.api.v1.watch.renew.instance.token"
    heard: list[Message] = []
    async with (
        controller.subscribe(subject) as messages,
        connect(nats.settings("observer"), name="observer") as observer,
        connect(nats.settings("client"), name="client") as client,
        asyncio.timeout(10),
    ):
        for bus in (observer, client):
            await bus.publish(subject, {})
            heard.append(await anext(messages))
    assert [account_of(one.headers) for one in heard] == ["OBSERVER", "CLIENT"]


async def test_history_ends_at_its_byte_limit_and_continues_after_it(controller: NatsBus) -> None:
    for number in range(30):
        subject = f"virtbus.evt.n1.0192f0c1-2d3e-7abc-8def-{number:012x}.vm.accepted"
        controller.emit(subject, {"message": "x" * 60_000}, message_id=f"id-{number}")
    seen, after = 0, 0
    async with asyncio.timeout(20):
        while seen < 30:
            found = await controller.history("virtbus.evt.>", after=after, limit=1000)
            assert sum(len(one.body) for one in found) <= HISTORY_BYTES + 61_000
            seen += len(found)
            after = found[-1].sequence if found else after


FORGED = b'Nats-Request-Info: {"acc":"CTL"}'
BLOCKS = (
    b"NATS/1.0\r\nX: y",
    b"NATS/1.0\r\nX: y\r\n",
    b"NATS/1.0\r\nX: y\r\n\r\n",
    b"NATS/1.0\r\n",
    b"NATS/1.0\r\nX",
    b"NATS/1.0",
    b"NATS/1.0 500\r\n",
    b"NATS/1.0 500 \r\n",
    b"NATS/1.0 500 no\r\n",
    b"NATS/1.1 7\r\nX\r\n",
    b"NA\r\n",
    b"NA",
    b"\r\n\r\n",
    b"\x80\r\nX: y",
    b"NATS/1.0\r\n" + FORGED,
    b"NATS/1.0\r\n" + FORGED + b"\r\n",
    b"NATS/1.0\r\n" + FORGED + b"\r\nX: y",
    b"NATS/1.0\r\n" + FORGED + b"\r\n" + FORGED + b"\r\nX: y",
    b"NATS/1.0\r\n" + FORGED + b"\r\n" + FORGED + b"\r\nX",
    b"\r\n" + FORGED + b"\r\nX: y",
    FORGED + b"\r\n\r\n",
    FORGED + b"\r\n" + FORGED + b"\r\n\r\n",
    FORGED + b"\r\n" + FORGED + b"\r\nX: y",
    b"NATS/1.0\r\nNats-Request-Info : a\r\nX: y",
    b'NATS/1.0\r\nNats-Request-Info: {"acc":"CTL","x":"__',
)
"""The server appends its header two bytes before the end of a block, and so to a line of it."""


async def test_no_header_block_hides_the_account_of_a_request(
    nats: Server, controller: NatsBus
) -> None:
    seen: list[str] = []

    async def who(request: Request) -> Any:
        seen.append(request.account)
        return request.account

    async with (
        controller.serve(INFO, [Endpoint("get", GET, who)]),
        stranger(nats, "observer") as thief,
        listening(thief, f"{thief.inbox_prefix}.>") as heard,
    ):
        for number, block in enumerate(BLOCKS):
            line = f"HPUB {GET} {thief.inbox_prefix}.{number} {len(block)} {len(block)}\r\n"
            await thief.client._send_command(line.encode() + block + b"\r\n")
            await thief.client._flush_pending()
        async with asyncio.timeout(10):
            while len(heard) < len(BLOCKS):
                await asyncio.sleep(0.01)
        answered = [(one.headers or {}).get("Nats-Service-Error-Code", "") for one in heard]
    assert set(seen) == {"OBSERVER"}
    assert set(answered) == {"", "400", "403"}  # 400: a block of two bytes belongs to the body
    assert answered.count("") == len(seen)


async def test_history_without_its_stream_is_an_error_and_not_empty(
    nats: Server, controller: NatsBus
) -> None:
    assert await controller.history("virtbus.dlq.>") == []
    async with connect(nats.settings("admin"), name="admin") as admin:
        await admin.js_api("STREAM.DELETE.DLQ")
    with pytest.raises(UnavailableError, match="nobody answers"):
        await controller.history("virtbus.dlq.>")
