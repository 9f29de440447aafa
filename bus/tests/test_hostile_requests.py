"""No request, answer or event ends a service, and every requester is answered (ADR 0028)."""

import asyncio
import json
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import product
from typing import Any

import pytest

from virtbus.bus.client.answers import render_error
from virtbus.bus.client.codec import pack
from virtbus.bus.client.link import Raw
from virtbus.bus.client.message_format import CONTENT_TYPE, ERROR_CODE, JSON
from virtbus.bus.client.ports import Bus, Endpoint, Message, Request, ServiceInfo
from virtbus.bus.client.requests import data_of
from virtbus.bus.client.subscriptions import hear
from virtbus.bus.errors import BusError
from virtbus.schemas.api import VmCreate, VmRef
from virtbus.schemas.errors import (
    MAX_DETAIL_CHARS,
    MAX_DETAILS,
    MAX_ERROR_BYTES,
    Code,
    Detail,
    ErrorBody,
    VirtbusError,
)
from virtbus.schemas.wire import MAX_HINTS, validate

INFO = ServiceInfo("controller", "1.0.0", "tests")
SUBJECT = "virtbus.api.v1.vm.get"
CONTROLS = "\x01" * 400_000
"""JSON writes six bytes for each."""


class StubbornError(Exception):
    """An object whose text cannot be made."""

    def __str__(self) -> str:
        msg = "no words"
        raise RuntimeError(msg)


def _details(count: int, text: str) -> tuple[Detail, ...]:
    return tuple(Detail(path=text, message=text, hint=text) for _ in range(count))


FAILURES: dict[str, Callable[[], BaseException]] = {
    "many details": lambda: VirtbusError(
        Code.INVALID, "invalid", "x", details=_details(20_000, "spec.field")
    ),
    "long details": lambda: VirtbusError(
        Code.INVALID, "invalid", CONTROLS, details=_details(200, CONTROLS)
    ),
    "a lone surrogate": lambda: VirtbusError(Code.INVALID, "\ud800", "\udcff not text"),
    "a line break for the headers": lambda: VirtbusError(
        Code.INVALID, "invalid", "a\r\nNats-Service-Error: b\r\n\r\nc"
    ),
    "four bytes a letter": lambda: VirtbusError(
        Code.INVALID, "invalid", "\U0001f600" * 9999, details=_details(100, "\U0001f600" * 999)
    ),
    "a group": lambda: ExceptionGroup("both", [ValueError("a"), OSError("b")]),
    "no words": StubbornError,
    "a cancel of its own": asyncio.CancelledError,
    "deep": RecursionError,
    "no memory": MemoryError,
}


@asynccontextmanager
async def asking(bus: Bus) -> AsyncIterator[Callable[..., Any]]:
    """Send raw bytes to SUBJECT, as a client without any library of ours."""

    async def ask(body: bytes, headers: dict[str, str] | None = None) -> Raw:
        link = bus._link  # type: ignore[attr-defined]  # bytes below the bus' own encoding
        raw: Raw = await link.ask(SUBJECT, body, headers=headers or {}, timeout_s=5)
        return raw

    yield ask


@pytest.mark.parametrize("as_json", [True, False])
async def test_every_exception_of_a_handler_is_answered_and_the_next_request_is_served(
    bus: Bus, other: Bus, *, as_json: bool
) -> None:
    async def handler(request: Request) -> Any:
        if request.data in FAILURES:
            failure = FAILURES[request.data]()
            raise failure
        return "served"

    headers = {CONTENT_TYPE: JSON} if as_json else {}
    async with bus.serve(INFO, [Endpoint("get", SUBJECT, handler)]), asking(other) as ask:
        for why in FAILURES:
            for _ in range(2):
                refused = await ask(pack(why), headers)
                assert refused.headers[ERROR_CODE] in {"400", "500", "503"}, why
                assert len(refused.body) <= MAX_ERROR_BYTES, why
                allowed = {ERROR_CODE, CONTENT_TYPE, "Nats-Service-Error"}
                assert set(refused.headers) <= allowed, why
            assert not (await ask(pack("x"))).headers.get(ERROR_CODE), why


async def test_an_answer_that_cannot_be_sent_is_a_refusal(bus: Bus, other: Bus) -> None:
    values = (object(), "\ud800", b"x" * 2_000_000, {1: {2: 3}}, 2**70)

    async def handler(request: Request) -> Any:
        return values[request.data]

    async with bus.serve(INFO, [Endpoint("get", SUBJECT, handler)]), asking(other) as ask:
        for index, headers in product(range(len(values)), ({}, {CONTENT_TYPE: JSON})):
            raw = await ask(pack(index), headers)
            assert raw.headers.get(ERROR_CODE) in {"413", "500", None}, index
            assert len(raw.body) <= MAX_ERROR_BYTES, index


BODIES = {
    "unknown fields as JSON": json.dumps({f"k{n}": 1 for n in range(19_900)}).encode(),
    "unknown fields": pack({f"field_{n}": 1 for n in range(19_900)}),
    "long field": pack({"x" * 400_000: 1}),
    "controls": pack({"uid": CONTROLS}),
    "deep JSON": b'{"a":' * 80_000,
    "deep": b"\x91" * 500_000,
    "too large": b"\xc4" * 524_289,
    "no JSON": b"{",
    "no msgpack": b"\xc1",
    "nothing": b"",
    "surrogate": b'{"uid":"\\ud800"}',
    "twice": b'{"uid":1,"uid":2}',
    "numbers": b'{"uid":' + b"9" * 400_000 + b"}",
    "an envelope of nonsense": b'{"data":1,"id":5,"timeout_ms":-1,"epoch":"x"}',
    "extension": b"\xc7\x01\x05a",
}


async def test_every_request_gets_a_bounded_answer_in_time(bus: Bus, other: Bus) -> None:
    async def create(request: Request) -> Any:
        return validate(VmCreate, request.data).name

    async with bus.serve(INFO, [Endpoint("get", SUBJECT, create)]), asking(other) as ask:
        for (name, body), headers in product(BODIES.items(), ({}, {CONTENT_TYPE: JSON})):
            before_s = time.thread_time()
            raw = await ask(body, headers)
            assert time.thread_time() - before_s < 2.0, name
            assert raw.headers[ERROR_CODE] in {"400", "413"}, name
            assert len(raw.body) <= MAX_ERROR_BYTES, name


def test_a_refusal_is_bounded_even_if_a_peer_sent_it() -> None:
    body = ErrorBody(code=400, reason="r" * 999, message=CONTROLS, details=_details(300, CONTROLS))
    for error in (VirtbusError(Code.INVALID, "r", CONTROLS, details=body.details),
                  VirtbusError.of(body)):  # fmt: skip
        assert len(error.body.details) <= MAX_DETAILS
        assert len(error.body.reason) <= 64
        assert all(len(one.path) <= MAX_DETAIL_CHARS for one in error.body.details)
        for as_json in (True, False):
            assert len(render_error(error, as_json=as_json)[0]) <= MAX_ERROR_BYTES
        assert "more are not listed" in error.body.details[-1].message
        assert "\x01" not in str(error)


def test_hints_are_given_for_the_first_unknown_fields_only() -> None:
    wanted = {f"nam{n}": 1 for n in range(19_000)}
    before_s = time.thread_time()
    with pytest.raises(VirtbusError) as caught:
        validate(VmCreate, wanted)
    assert time.thread_time() - before_s < 1.0
    details = caught.value.body.details
    assert len(details) == MAX_DETAILS
    assert 0 < sum(bool(one.hint) for one in details) <= MAX_HINTS
    assert details[-1].message == "18902 more are not listed; fix these first"


@pytest.mark.parametrize(
    "wanted",
    [
        {f"nam{n}": 1 for n in range(19_000)},
        {"spec": {"volumes": [1] * 19_000}},
        {"spec": {"volumes": [{"name": "a", "x": 1}] * 9_000}},
    ],
    ids=["unknown fields", "wrong items", "wrong items of maps"],
)
def test_a_refusal_of_thousands_of_problems_takes_little_memory(wanted: dict[str, object]) -> None:
    with pytest.raises(VirtbusError):
        validate(VmCreate, {"name": "a b"})  # what is made once
    tracemalloc.start()
    try:
        with pytest.raises(VirtbusError, match="more") as caught:
            validate(VmCreate, wanted)
        assert tracemalloc.get_traced_memory()[1] < 3 * 2**20
    finally:
        tracemalloc.stop()
    assert "more are not listed" in caught.value.body.details[-1].message


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ({ERROR_CODE: "\u00b2"}, b""),
        ({ERROR_CODE: "9" * 5000}, b""),
        ({ERROR_CODE: "400"}, pack({"error": {"code": "x", "reason": 5}})),
        ({ERROR_CODE: "400"}, pack({"error": [1]})),
        ({ERROR_CODE: "400"}, pack(["error"])),
        ({CONTENT_TYPE: JSON}, b"[" * 200_000),
        ({}, b"\xc1"),
    ],
)
def test_an_invalid_answer_is_an_error_of_the_bus(headers: dict[str, str], body: bytes) -> None:
    with pytest.raises((BusError, VirtbusError)):
        data_of(Raw("x", body, headers=headers))


async def test_events_that_cannot_be_read_or_acted_on_are_left_out() -> None:
    async def messages() -> AsyncIterator[Message]:
        for body in (*BODIES.values(), pack({"data": {"name": "fails"}})):
            yield Message("s", body)
        yield Message("s", pack({"data": {"name": "web"}}))

    heard: list[str | None] = []

    def take(ref: VmRef) -> None:
        if ref.name == "fails":
            raise RuntimeError
        heard.append(ref.name)

    await hear(messages(), VmRef, take)
    assert heard[-1] == "web"
    assert "fails" not in heard
