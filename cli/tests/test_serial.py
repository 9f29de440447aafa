"""Console and logs: a scripted agent on a real nats-server, the command on a real pty."""

import asyncio
import os
import pty
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest
from cli.tests.fakes import UID, Cli, Script, environment, run, start, vm_view

from virtbus.bus.client.flow_control import WINDOW_BYTES
from virtbus.bus.client.ports import Endpoint, Request, ServiceInfo
from virtbus.bus.client.streams import ByteStream, accepting
from virtbus.cli.vm.logs import Visible
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.streams import ConsoleOpen, LogsRead
from virtbus.schemas.subjects import rpc
from virtbus.schemas.wire import validate

pytestmark = pytest.mark.integration


class Guest:
    """An agent whose guest answers in capitals, and stops at `bye`."""

    def __init__(self, script: Script) -> None:
        self._bus = script.node
        self.typed = b""
        self.asked: ConsoleOpen | None = None
        self.more = 0
        self.detached = asyncio.Event()

    async def console(self, request: Request) -> None:
        want = validate(ConsoleOpen, request.data)
        assert want.uid == UID
        self.asked = want
        async with accepting(self._bus, request, want) as stream:
            await stream.write(b"login: ")
            await stream.while_open(self._converse(stream))
            if stream.closed == "detached":
                self.detached.set()

    async def _converse(self, stream: ByteStream) -> None:
        while keys := await stream.read():
            self.typed += keys
            await stream.write(keys.upper())
            if b"bye" in self.typed:
                stream.end("the guest stopped")

    async def logs(self, request: Request) -> None:
        want = validate(LogsRead, request.data)
        if want.tail_bytes == 1:
            raise VirtbusError(Code.NOT_FOUND, "vm_not_here", "not on this node")
        async with accepting(self._bus, request, want) as stream:
            await stream.write(b"boot\r\n\x1b[31mred\n" + b"y" * self.more)
            stream.end("end of log")


@pytest.fixture
async def guest(script: Script) -> AsyncIterator[Guest]:
    found = Guest(script)
    script.answer("vm", "get", vm_view())
    endpoints = [
        Endpoint("console", rpc("n1", "agent", "console"), found.console),
        Endpoint("logs", rpc("n1", "agent", "logs"), found.logs),
    ]
    async with script.node.serve(ServiceInfo("virtbus-nodeagent", "0", "fake"), endpoints):
        yield found


async def read_until(descriptor: int, wanted: bytes) -> bytes:
    """Read a terminal until `wanted` has appeared."""
    shown = b""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(descriptor, readable.set)
    try:
        while wanted not in shown:
            await readable.wait()
            readable.clear()
            with suppress(BlockingIOError):  # the loop may report the same bytes twice
                shown += os.read(descriptor, 4096)
    finally:
        loop.remove_reader(descriptor)
    return shown


async def test_console_on_a_terminal_passes_keys_and_leaves_by_escape(
    script: Script, guest: Guest
) -> None:
    ours, theirs = pty.openpty()
    os.set_blocking(ours, False)
    try:
        process = await start(
            *("vm", "console", "web"),
            env=environment(script.files),
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
        )
        await read_until(ours, b"login: ")
        os.write(ours, b"ro\x03ot\r")  # Ctrl-C belongs to the guest
        await read_until(ours, b"RO\x03OT\r")
        os.write(ours, b"x\x1dnot sent")
        await read_until(ours, b"left the console")
        assert await process.wait() == 0
        async with asyncio.timeout(5):
            await guest.detached.wait()
    finally:
        os.close(ours)
        os.close(theirs)
    assert guest.typed == b"ro\x03ot\rx"


async def test_console_takes_piped_input_and_reads_on_for_a_while(cli: Cli, guest: Guest) -> None:
    ended = await cli("vm", "console", "web", "--linger", "0.5", stdin="uname\n")
    assert ended.code == 0, ended.err
    assert ended.out == "login: UNAME\n"
    assert guest.typed == b"uname\n"


async def test_console_ends_with_the_guest(cli: Cli, guest: Guest) -> None:
    ended = await cli("vm", "console", "web", "--linger", "15", stdin="bye\n")
    assert ended.code == 0
    assert "the guest stopped" in ended.err
    assert guest.typed == b"bye\n"


@pytest.mark.usefixtures("guest")
async def test_logs_show_escape_codes_as_text_unless_raw(cli: Cli) -> None:
    assert (await cli("vm", "logs", "web")).out == "boot\n\\x1b[31mred\n"
    assert "\x1b[31mred" in (await cli("vm", "logs", "web", "--raw")).out


async def test_a_log_larger_than_the_window_comes_whole(cli: Cli, guest: Guest) -> None:
    guest.more = 3 * WINDOW_BYTES
    assert (await cli("vm", "logs", "web")).out.count("y") == 3 * WINDOW_BYTES


async def test_large_piped_input_arrives_complete(cli: Cli, guest: Guest) -> None:
    typed = "0123456789abcde\n" * 16 * 1024
    ended = await cli("vm", "console", "web", "--linger", "15", stdin=typed + "bye\n")
    assert ended.code == 0, ended.err
    assert guest.typed.decode() == typed + "bye\n"


async def test_the_console_opens_with_its_settings(cli: Cli, guest: Guest) -> None:
    await cli("vm", "console", "web", "--view", "--tail-bytes", "99", "--linger", "0", stdin="")
    assert guest.asked is not None
    assert (guest.asked.write, guest.asked.tail_bytes) == (False, 99)
    assert "@" in guest.asked.owner


@pytest.mark.usefixtures("guest")
def test_logs_show_every_control_character_as_text() -> None:
    shown = Visible()
    said = [shown.text(part) for part in (b"a\tb\r\n\xc2\x9b31m\x7f\x9b", b"\xe2\x82", b"\xac")]
    assert b"".join(said).decode() == "a\tb\n\\x9b31m\\x7f\\x9b€"


async def test_logs_of_a_vm_that_is_elsewhere_exit_3(cli: Cli) -> None:
    assert (await cli("vm", "logs", "web", "--tail-bytes", "1")).code == 3


async def test_the_console_of_an_unplaced_vm_names_the_reason(script: Script, cli: Cli) -> None:
    script.answer("vm", "get", vm_view(node="_"))
    ended = await cli("vm", "console", "web")
    assert ended.code == 1
    assert "has no node yet" in ended.err


async def test_silent_agent_is_unavailable(script: Script) -> None:
    script.answer("vm", "get", vm_view(node="n9"))
    ended = await run("vm", "logs", "web", env=environment(script.files))
    assert ended.code == 5
    assert "node's agent" in ended.err
