"""A delete of an image that is being downloaded ends the download, or is refused (IMG-21)."""

import asyncio
import contextlib

import pytest
from aiohttp import web
from services.imaged.tests.records import UID, record, uid, volume
from services.imaged.tests.site_under_test import MIB, Web, qcow2_image
from services.imaged.tests.test_service import Desk, desk

from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.node_rpc import ForgetImage, PullImage, Release

__all__ = ["desk"]
JOB = uid(0xABC)


class Slow:
    """A server that sends the first part of an image, and the rest once it may."""

    def __init__(self, server: Web) -> None:
        self.begun, self.may_end = asyncio.Event(), asyncio.Event()
        server.handlers["a"] = self.send

    async def send(self, request: web.Request) -> web.StreamResponse:
        data = qcow2_image()
        response = web.StreamResponse(headers={"Content-Length": str(len(data))})
        await response.prepare(request)
        await response.write(data[: len(data) // 2])
        self.begun.set()
        await self.may_end.wait()
        with contextlib.suppress(ConnectionError):
            await response.write(data[len(data) // 2 :])
        return response


async def refused(desk: Desk, ref: str) -> str:
    with pytest.raises(VirtbusError) as error:
        await desk.ask("delete", ForgetImage(ref=ref))
    return error.value.reason


async def pulled(desk: Desk, url: str) -> str:
    """Return the reason why a pull ends, or "done"."""
    try:
        await desk.ask("pull", PullImage(ref=url, job=JOB))
    except VirtbusError as error:
        return error.reason
    return "done"


async def settled(desk: Desk) -> None:
    parts = desk.state / "images" / "part"
    async with asyncio.timeout(10):
        while list(parts.iterdir()):
            await asyncio.sleep(0.01)


async def test_a_delete_ends_the_downloads_of_an_image(desk: Desk, server: Web) -> None:
    slow, url = Slow(server), server.url("a")
    async with asyncio.TaskGroup() as group:
        pull = group.create_task(pulled(desk, url))
        await slow.begun.wait()
        assert await refused(desk, "other") == "image_unknown"
        assert not (await desk.ask("delete", ForgetImage(ref=url))).get("names")
    assert pull.result() == "image_deleted"
    slow.may_end.set()
    await settled(desk)
    assert not (await desk.ask("list", {})).get("images")
    assert await refused(desk, url) == "image_unknown"
    again = await desk.ask("pull", PullImage(ref=url, job=JOB))
    assert again["size_bytes"] == len(qcow2_image())


async def test_an_image_that_a_vm_waits_for_is_not_deleted(desk: Desk, server: Web) -> None:
    slow, url = Slow(server), server.url("a")
    await desk.put(record(volume(url, 64 * MIB)))
    await slow.begun.wait()
    async with asyncio.TaskGroup() as group:
        pull = group.create_task(pulled(desk, url))
        await asyncio.sleep(0.1)
        assert await refused(desk, url) == "image_wanted"
        slow.may_end.set()
        assert (await desk.ready()).error is None
    assert pull.result() == "done"
    await desk.put(record(volume(url, 64 * MIB), generation=2, deleting=True))
    await desk.ask("release", Release(uid=UID, epoch=1))
    assert (await desk.ask("delete", ForgetImage(ref=url)))["freed_bytes"]
