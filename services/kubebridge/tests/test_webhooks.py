"""The webhooks over HTTP: what is no review is refused before it costs anything."""

import asyncio
import io
import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from services.kubebridge.tests.manifests import vm

from virtbus.kubebridge.core.admission import answer
from virtbus.kubebridge.edge import admission
from virtbus.kubebridge.edge.admission import (
    AT_ONCE,
    LARGE_BYTES,
    MAX_BYTES,
    MUTATE,
    VALIDATE,
    routes,
)

Asker = TestClient[web.Request, web.Application]


@pytest.fixture
async def asker() -> AsyncIterator[Asker]:
    application = web.Application()
    application.add_routes(routes(read_s=1.0))
    async with TestClient(TestServer(application)) as client:
        yield client


def review() -> bytes:
    request = {
        "uid": "u1",
        "kind": {"kind": "VirtualMachine"},
        "operation": "CREATE",
        "object": vm(),
    }
    whole = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}
    return json.dumps(whole).encode()


async def test_both_answer_a_review(asker: Asker) -> None:
    for path, patches in ((MUTATE, True), (VALIDATE, False)):
        said = await (await asker.post(path, data=review())).json()
        assert (said["response"]["uid"], said["response"]["allowed"]) == ("u1", True)
        assert ("patch" in said["response"]) is patches


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", 400),
        (b"{", 400),
        (b"\xff", 400),
        (b"[]", 400),
        (b"[" * 100_000, 400),
        (b" " * (MAX_BYTES + 1), 413),
    ],
    ids=["empty", "cut off", "no text", "no object", "deep", "long"],
)
async def test_what_is_no_review_is_refused(asker: Asker, body: bytes, code: int) -> None:
    assert (await asker.post(MUTATE, data=io.BytesIO(body))).status == code


async def test_a_body_that_never_ends_is_refused_once_it_is_too_long(asker: Asker) -> None:
    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b" " * 65536

    assert (await asker.post(MUTATE, data=endless())).status == 413


async def test_who_sends_nothing_keeps_others_waiting_for_a_moment_only(asker: Asker) -> None:
    """Bodies that never come take all the room there is, and lose it again."""
    never = asyncio.Event()

    async def silent() -> AsyncIterator[bytes]:
        yield b"{"
        await never.wait()

    async def stall() -> int:
        return (await asker.post(MUTATE, data=silent())).status

    async with asyncio.TaskGroup() as group:
        stalled = [group.create_task(stall()) for _ in range(AT_ONCE)]
        assert {await one for one in stalled} == {408}
        never.set()
    assert (await asker.post(MUTATE, data=review())).status == 200


async def test_a_review_that_takes_long_keeps_nobody_waiting(
    asker: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who may create VMs may write 3 MiB of labels, each of them wrong."""
    began, goes_on = threading.Event(), threading.Event()

    def slow(asked: Any, *, mutating: bool) -> Any:
        if "padding" in asked["request"]:
            began.set()
            assert goes_on.wait(5), "nobody else was answered"
        return answer(asked, mutating=mutating)

    monkeypatch.setattr(admission, "answer", slow)
    long = json.loads(review())
    long["request"]["padding"] = " " * LARGE_BYTES
    async with asyncio.TaskGroup() as group:
        asked = group.create_task(asker.post(MUTATE, json=long))
        while not began.is_set():
            await asyncio.sleep(0)
        assert (await asker.post(MUTATE, data=review())).status == 200
        goes_on.set()
    assert (await asked).status == 200
