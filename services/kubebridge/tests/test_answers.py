"""Every error on the way to an answer becomes a Status with the next step."""

import asyncio
import json
from typing import Any
from unittest.mock import Mock

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer, make_mocked_request

from virtbus.bus.errors import OutcomeUnknownError, UnavailableError
from virtbus.kubebridge.core.objects.status_errors import bad_request
from virtbus.kubebridge.edge.cluster import StatusError, UnreachableError
from virtbus.kubebridge.edge.web.error_middleware import RefusedError, in_status
from virtbus.schemas.errors import Code, VirtbusError


async def said(error: Exception) -> tuple[int, Any]:
    async def handler(_request: web.Request) -> web.StreamResponse:
        raise error

    response = await in_status(make_mocked_request("GET", "/", writer=Mock(output_size=0)), handler)
    assert isinstance(response, web.Response)
    assert response.text is not None
    return response.status, json.loads(response.text)


@pytest.mark.parametrize(
    ("error", "code", "reason", "message"),
    [
        (RefusedError(bad_request("no")), 400, "BadRequest", "no"),
        (VirtbusError(Code.CONFLICT, "busy", "later"), 409, "Conflict", "later"),
        (VirtbusError(Code.GONE, "gone", "it was"), 410, "Gone", "it was"),
        (VirtbusError(Code.EXHAUSTED, "full", "many"), 429, "TooManyRequests", "many"),
        (VirtbusError(Code.DEADLINE, "late", "slow"), 504, "Timeout", "slow"),
        (UnavailableError("no bus"), 503, "ServiceUnavailable", "no bus"),
        (OutcomeUnknownError("who knows"), 503, "ServiceUnavailable", "who knows"),
        (UnreachableError("no API server"), 503, "ServiceUnavailable", "no API server"),
        (StatusError({"code": 429, "message": "busy"}), 503, "ServiceUnavailable", "busy"),
        (
            StatusError({"code": 403, "reason": "Forbidden", "message": "not you"}),
            *(403, "Forbidden", "not you"),
        ),
        (
            StatusError({"code": 401, "message": "Unauthorized"}),
            503,
            "ServiceUnavailable",
            "Unauthorized",
        ),
        (web.HTTPNotFound(), 404, "NotFound", "Not Found"),
        (web.HTTPServiceUnavailable(text="retry"), 503, "ServiceUnavailable", "retry"),
    ],
)
async def test_an_error_is_answered_with_its_code_and_words(
    error: Exception, code: int, reason: str, message: str
) -> None:
    status, answer = await said(error)
    assert (status, answer["code"], answer["reason"], answer["message"]) == (
        code,
        code,
        reason,
        message,
    )
    assert (answer["kind"], answer["status"]) == ("Status", "Failure")


async def test_an_internal_error_is_logged_and_not_shown(
    caplog: pytest.LogCaptureFixture,
) -> None:
    status, answer = await said(KeyError("secret"))
    assert (status, answer["reason"]) == (500, "InternalError")
    assert "secret" not in answer["message"]
    assert "secret" in caplog.text


async def test_a_disconnected_client_gets_no_answer() -> None:
    with pytest.raises(ConnectionResetError):
        await said(ConnectionResetError())


async def test_an_error_after_the_begin_of_a_response_adds_no_second_one() -> None:
    async def breaks(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"begun")
        raise KeyError("in the middle")

    application = web.Application(middlewares=[in_status])
    application.add_routes([web.get("/", breaks)])
    async with TestServer(application) as server:
        reader, writer = await asyncio.open_connection(server.host, server.port)
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        said = await asyncio.wait_for(reader.read(), 10)
        writer.close()
    assert said.count(b"HTTP/1.1") == 1
    assert b"begun" in said
