"""Spans become events; traceparents travel even if nothing is recorded."""

import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from virtbus.bus.client import tracing
from virtbus.bus.client.codec import read_message
from virtbus.bus.client.memory_bus import MemoryBus, MemoryServer
from virtbus.bus.client.ports import Message
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.events import Span, SpanBatch

UID = "0192f0c1-2d3e-7abc-8def-0123456789ab"
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def bus() -> MemoryBus:
    return MemoryBus(MemoryServer(), "agent")


Finished = Callable[[], Awaitable[list[Span]]]


@pytest.fixture
def finished(bus: MemoryBus) -> Iterator[Finished]:
    """Record spans; calling it stops, which publishes the batched ones."""
    recorded = ExitStack()
    recorded.enter_context(tracing.recording("nodeagent", "n1", bus.emit))

    async def told() -> list[Span]:
        recorded.close()
        stored = await bus.history(f"virtbus.evt.n1.{UID}.trace.span")
        messages = [Message(one.subject, one.body) for one in stored]
        return [span for message in messages for span in read_message(SpanBatch, message).spans]

    yield told
    recorded.close()


async def test_a_span_of_a_vm_is_stored_under_its_parent(
    bus: MemoryBus, finished: Finished
) -> None:
    with tracing.span("virtbus start domain", uid=UID, parent=PARENT, disk="root"):
        inner = tracing.current_traceparent()
        with tracing.span("virtbus define domain", uid=UID):
            pass
    define, start = await finished()
    assert start.trace_id == define.trace_id == "0af7651916cd43dd8448eb211c80319c"
    assert start.parent_id == "b7ad6b7169203331"
    assert define.parent_id == start.span_id
    assert inner == f"00-{start.trace_id}-{start.span_id}-01"
    assert start.attributes == {"disk": "root"}
    assert (start.service, start.node, start.ok) == ("nodeagent", "n1", True)
    assert start.end_ns >= define.end_ns >= define.start_ns >= start.start_ns


async def test_a_failed_span_has_the_reason_and_not_the_text(
    bus: MemoryBus, finished: Finished
) -> None:
    with pytest.raises(VirtbusError), tracing.span("virtbus pull image", uid=UID):
        raise VirtbusError(Code.NOT_FOUND, "no_such_image", "password=hunter2")
    (failed,) = await finished()
    assert (failed.ok, failed.message) == (False, "no_such_image")
    assert "hunter2" not in failed.model_dump_json()


async def test_a_span_continues_the_request_that_is_handled(
    bus: MemoryBus, finished: Finished
) -> None:
    with tracing.continued(PARENT), tracing.span("virtbus create vm", uid=UID):
        pass
    (create,) = await finished()
    assert create.parent_id == "b7ad6b7169203331"


async def test_the_span_of_a_process_that_cannot_publish_is_published_for_it(
    bus: MemoryBus, finished: Finished
) -> None:
    with tracing.span("virtbus attach network", uid=UID, parent=PARENT):
        pass
    tracing.record_span(
        "virtbus fetch", uid=UID, parent=PARENT, service="wrapper", start_ns=5, end_ns=9, asked="1"
    )
    _, fetch = await finished()
    assert (fetch.service, fetch.start_ns, fetch.end_ns) == ("wrapper", 5, 9)
    assert fetch.parent_id == "b7ad6b7169203331"
    assert fetch.attributes == {"asked": "1"}
    assert len(await bus.history("virtbus.evt.>")) == 1  # one message for both


async def test_a_span_without_a_vm_is_not_stored(bus: MemoryBus, finished: Finished) -> None:
    with tracing.span("virtbus list vms"), tracing.span("virtbus odd", uid="../etc"):
        pass
    await finished()
    assert await bus.history("virtbus.evt.>") == []


def test_without_setup_a_span_only_passes_the_traceparent_on() -> None:
    with tracing.span("virtbus create vm", uid=UID, parent=PARENT):
        assert tracing.current_traceparent() == PARENT
    assert tracing.current_traceparent() is None


@pytest.mark.parametrize(
    "text", ["", "x", PARENT + "\r\nEvil: 1", PARENT.replace("0af7", "0AF7"), f"00-{'0' * 32}-1-1"]
)
def test_an_invalid_traceparent_is_not_passed_on(text: str) -> None:
    with tracing.continued(text):
        assert tracing.current_traceparent() is None


def test_spans_go_to_a_configured_collector() -> None:
    got: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    server = HTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        endpoint = f"http://127.0.0.1:{server.server_port}"
        with (
            tracing.recording("x", "n1", otlp_endpoint=endpoint),
            tracing.span("virtbus create vm", uid=UID),
        ):
            pass
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert got[0][0] == "/v1/traces"
    assert b"virtbus create vm" in got[0][1]
