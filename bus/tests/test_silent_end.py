"""A connection that ends without a callback of nats-py, as after a long pause of the process."""

import asyncio

import pytest

from virtbus.bus.client.connection import NatsLink
from virtbus.bus.errors import UnavailableError
from virtbus.bus.provisioning import server
from virtbus.bus.runtime.tasks import background

pytestmark = pytest.mark.integration


async def _end_without_a_word(link: NatsLink) -> None:
    """Leave the client as a failed flush in its `_close` does: closed, and no callback called."""
    client = link._client
    assert client is not None
    client._closed_cb = None
    await client.close()


async def _again(link: NatsLink) -> None:
    async with asyncio.timeout(10):
        while link.generation < 2:
            await asyncio.sleep(0.05)


async def test_a_silently_ended_connection_is_made_again(nats: server.Server) -> None:
    link = NatsLink(nats.settings("controller"), "c")
    await link.first()
    async with background() as tasks:
        tasks.start(link.run())
        await _end_without_a_word(link)
        await _again(link)
        await link.send("virtbus.report.x", b"")


async def test_a_failed_send_reports_the_end_of_the_connection(nats: server.Server) -> None:
    link = NatsLink(nats.settings("controller"), "c")
    await link.first()
    async with background() as tasks:
        tasks.start(link.run())
        await _end_without_a_word(link)
        with pytest.raises(UnavailableError):
            await link.send("virtbus.report.x", b"")
        await _again(link)


async def test_temporarily_missing_credentials_are_awaited(
    nats: server.Server,
) -> None:
    settings = nats.settings("controller")
    assert settings.creds is not None
    kept = settings.creds.read_text()
    link = NatsLink(settings, "c")
    await link.first()
    async with background() as tasks:
        tasks.start(link.run())
        settings.creds.unlink()
        await _end_without_a_word(link)
        async with asyncio.timeout(10):
            while "does not exist" not in link.fault:
                await asyncio.sleep(0.05)
        settings.creds.write_text(kept)
        await _again(link)
