"""The webhooks over HTTP refuse invalid reviews at little cost."""

import asyncio
import io
import json
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from services.kubebridge.tests.manifests import put, template, vm

from virtbus.kubebridge.core.objects.bounds import values_at_most
from virtbus.kubebridge.core.validation.admission import answer
from virtbus.kubebridge.edge import admission
from virtbus.kubebridge.edge.admission import (
    LARGE_BYTES,
    MAX_BYTES,
    MAX_VALUES,
    MUTATE,
    VALIDATE,
    routes,
)

TERMS = "requiredDuringSchedulingIgnoredDuringExecution"
Asker = TestClient[web.Request, web.Application]


@pytest.fixture
async def asker() -> AsyncIterator[Asker]:
    application = web.Application()
    application.add_routes(routes(answer_s=1.5, idle_s=1.0))
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


async def test_both_webhooks_answer_a_review(asker: Asker) -> None:
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
async def test_an_invalid_review_is_refused(asker: Asker, body: bytes, code: int) -> None:
    assert (await asker.post(MUTATE, data=io.BytesIO(body))).status == code


async def test_an_endless_body_is_refused_at_the_limit(asker: Asker) -> None:
    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b" " * 65536

    assert (await asker.post(MUTATE, data=endless())).status == 413


async def silent(of: asyncio.Event) -> AsyncIterator[bytes]:
    yield b"{"
    await of.wait()


async def test_silent_clients_delay_no_others(asker: Asker) -> None:
    """Bodies that never come hold no turn, in any number."""
    never = asyncio.Event()

    async def stall() -> int:
        return (await asker.post(MUTATE, data=silent(never))).status

    async with asyncio.TaskGroup() as group:
        stalled = [group.create_task(stall()) for _ in range(64)]
        await asyncio.sleep(0.2)  # each has sent its first byte
        begun_s = time.monotonic()
        assert (await asker.post(MUTATE, data=review())).status == 200
        assert time.monotonic() - begun_s < 0.5
        assert not any(one.done() for one in stalled)
        assert {await one for one in stalled} == {408}
        never.set()


async def test_a_slow_body_times_out(asker: Asker) -> None:
    async def drip() -> AsyncIterator[bytes]:
        while True:
            yield b" "
            await asyncio.sleep(0.1)

    assert (await asker.post(MUTATE, data=drip())).status == 408


async def test_a_review_with_too_many_values_is_refused_before_parsing(asker: Asker) -> None:
    long = json.loads(review())
    long["request"]["object"]["many"] = [{}] * MAX_VALUES
    answered = await asker.post(MUTATE, json=long)
    assert (answered.status, "more than 40000 values" in await answered.text()) == (400, True)


@pytest.mark.parametrize("what", ["labels", "terms", "unknown"])
async def test_the_largest_review_has_a_bounded_cost(what: str) -> None:
    many = MAX_VALUES - 200
    objects = {
        "labels": template_meta({f"{n:x}": 1 for n in range(many)}),
        "unknown": template({"domain": {f"{n:x}": 1 for n in range(many)}}),
        "terms": template({"affinity": {"nodeAffinity": {TERMS: {"nodeSelectorTerms": [
            {"matchExpressions": [{"key": "a", "operator": "In", "values": ["b"]}]}
        ] * (many // 7)}}}}),
    }  # fmt: skip
    whole = json.loads(review())
    whole["request"]["object"] = objects[what]
    said = json.dumps(whole)
    assert MAX_VALUES // 2 < values_at_most(said) <= MAX_VALUES
    begun_s = time.thread_time()
    answer(json.loads(said), mutating=True)
    assert time.thread_time() - begun_s < 3.0, "0.6 s on an idle machine"


def template_meta(labels: dict[str, Any]) -> dict[str, Any]:
    return put(vm(), {"spec.template.metadata.labels": labels})


async def test_only_known_clients_get_an_answer_if_that_is_required() -> None:
    application = web.Application()
    application.add_routes(routes(lambda request: request.headers.get("accepted") == "1"))
    async with TestClient(TestServer(application)) as client:
        assert (await client.post(MUTATE, data=review())).status == 401
        accepted = await client.post(VALIDATE, data=review(), headers={"accepted": "1"})
        assert accepted.status == 200


async def test_a_long_review_delays_no_others(
    asker: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenant may write 3 MiB of labels, each of them invalid."""
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
