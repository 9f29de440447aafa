"""Statuses of NATS that a sender writes into its own messages change nothing for readers."""

import asyncio

import pytest
from bus.tests.strangers import UID, Stranger, stranger

from virtbus.bus.client.nats_bus import NatsBus
from virtbus.bus.client.nats_protocol import publication
from virtbus.bus.client.ports import Entry, WatchMark
from virtbus.bus.provisioning import server

pytestmark = pytest.mark.integration

STATUSES = ("100", "204", "404", "408", "409", "500", "503")
KEY = f"$KV.st.n1.{UID}"


async def forge(thief: Stranger, subject: str, status: str, *, first_line: bool) -> None:
    """Store a message with a status, in a header or in the first line.

    The server removes the status of a first line that begins with `NATS/1.0`, and of no other.
    """
    reply = f"{thief.inbox_prefix}.stored"
    stored = await thief.client.subscribe(reply)
    command = publication(subject, status.encode(), reply, {"Status": status}, 1000)
    if first_line:
        head, line = f"NATS/1.0\r\nStatus: {status}", f"NATS/1.1 {status} Exceeded"
        command = command.replace(head.encode(), line.encode())
    await thief.client._send_command(command)
    await thief.client._flush_pending()
    answer = await stored.next_msg(timeout=5)
    assert b'"seq":' in answer.data
    await stored.unsubscribe()


@pytest.mark.parametrize("first_line", [False, True])
async def test_a_watch_lists_and_follows_keys_with_forged_statuses(
    nats: server.Server, controller: NatsBus, first_line: bool
) -> None:
    keys = [f"$KV.st.n1._{time}{status}" for time in ("a", "b") for status in STATUSES]
    half = len(STATUSES)
    seen: list[str] = []
    async with (
        stranger(nats, "node-n1") as thief,
        asyncio.timeout(15),
        controller.watch("$KV.st.>") as watch,
    ):
        for key in keys[:half]:
            await forge(thief, key, key[-3:], first_line=first_line)
        async for item in watch:
            seen.append(item.key if isinstance(item, Entry) else item)
            if item is WatchMark.SYNCED:
                for key in keys[half:]:
                    await forge(thief, key, key[-3:], first_line=first_line)
            if len(seen) >= len(keys) + 2:
                break
    assert seen == [WatchMark.RESET, *keys[:half], WatchMark.SYNCED, *keys[half:]]


@pytest.mark.parametrize("first_line", [False, True])
async def test_forged_statuses_hide_no_later_event(
    nats: server.Server, controller: NatsBus, first_line: bool
) -> None:
    event = f"virtbus.evt.n1.{UID}.x"
    async with stranger(nats, "node-n1") as thief:
        for status in STATUSES:
            await forge(thief, event, status, first_line=first_line)
        await thief.client.request(event, b"later")
    stored = await controller.history("virtbus.evt.>")
    assert [one.body.decode() for one in stored] == [*STATUSES, "later"]


@pytest.mark.parametrize("first_line", [False, True])
@pytest.mark.parametrize("status", ["404", "503"])
async def test_a_forged_status_hides_no_key(
    nats: server.Server, node: NatsBus, status: str, first_line: bool
) -> None:
    async with stranger(nats, "node-n1") as thief:
        await forge(thief, KEY, status, first_line=first_line)
    found = await node.get(KEY)
    assert found is not None
    assert found.value == status.encode()
