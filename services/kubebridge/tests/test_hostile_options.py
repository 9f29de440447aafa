"""The options of a verb have a bounded cost, because they are parsed on the shared event loop."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from virtbus.kubebridge.core.api.access import SubresourceTarget
from virtbus.kubebridge.core.api.front_proxy import User
from virtbus.kubebridge.edge.web.error_middleware import in_status
from virtbus.kubebridge.edge.web.subresources import (
    OBJECT_VALUES_MAX,
    OPTIONS_BYTES_MAX,
    OPTIONS_VALUES_MAX,
    Subresources,
)

BASE = "/apis/subresources.kubevirt.io/v1/namespaces/ns"
STOP = f"{BASE}/virtualmachines/web/stop"
EXPAND = f"{BASE}/expand-vm-spec"
Asker = TestClient[web.Request, web.Application]


class Anybody:
    """An authorizer that allows everything."""

    def user(self, _request: web.Request) -> User:
        return User("ann")

    async def may(self, _user: User, _method: str, _target: SubresourceTarget) -> None:
        """Allow the request."""


class Empty:
    """A cluster without objects."""

    async def get(self, *_of: object) -> None:
        """Return no object."""


@pytest.fixture
async def asker() -> AsyncIterator[Asker]:
    application = web.Application(middlewares=[in_status])
    empty: Any = Empty()
    anybody: Any = Anybody()
    application.add_routes(Subresources(empty, empty, anybody).routes())
    async with TestClient(TestServer(application)) as client:
        yield client


def merge_bomb(levels: int) -> str:
    lines = (f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}\n" for n in range(1, levels))
    return "a0: &a0 {k: v}\n" + "".join(lines)


@pytest.mark.parametrize(
    "body",
    [
        merge_bomb(18),
        merge_bomb(90),
        "[" * OPTIONS_BYTES_MAX,
        f"a: [{'b,' * OPTIONS_VALUES_MAX}]",
        "a: 1" + ":1" * 2000,
    ],
    ids=["merge keys", "more of them", "brackets", "values", "a number"],
)
async def test_expensive_options_are_refused(asker: Asker, body: str) -> None:
    assert len(body) <= OPTIONS_BYTES_MAX
    begun_s = time.thread_time()
    async with asyncio.timeout(10):
        answered = await asker.put(STOP, data=body)
        said = await answered.json()
    assert (answered.status, said["reason"]) == (400, "BadRequest")
    assert time.thread_time() - begun_s < 0.5


async def test_options_may_be_yaml_or_json(asker: Asker) -> None:
    for body in ("gracePeriod: 0\n", '{"gracePeriod": 0}', ""):
        assert (await asker.put(STOP, data=body)).status == 404, "there is no such VM"


async def test_an_object_with_too_many_values_is_refused_before_parsing(asker: Asker) -> None:
    answered = await asker.put(EXPAND, json={"spec": {"many": [{}] * OBJECT_VALUES_MAX}})
    said = await answered.json()
    assert (answered.status, "more than 20000 values" in said["message"]) == (400, True)
