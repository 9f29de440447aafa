"""Consoles over a socket that plays QEMU's: a hostile guest, and clients that connect and leave."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from virtbus.nodeagent.core.scrollback import ROOM_BYTES
from virtbus.nodeagent.edge.console import FELL_BEHIND, Consoles, Viewer
from virtbus.schemas.errors import VirtbusError

UID = "0192f0c1-2d3e-7abc-8def-0123456789ab"


@dataclass
class Serial:
    """QEMU's end: one connection at a time, like its server sockets."""

    path: Path
    writers: list[asyncio.StreamWriter] = field(default_factory=list)
    heard: bytearray = field(default_factory=bytearray)
    attached: asyncio.Queue[int] = field(default_factory=asyncio.Queue)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        self.attached.put_nowait(len(self.writers))
        with closing(writer):
            while data := await reader.read(4096):
                self.heard += data


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="vb-") as name:  # short: socket paths end at 107
        yield Path(name)


@pytest.fixture
async def serial(folder: Path) -> AsyncIterator[Serial]:
    made = Serial(folder / "console.sock")
    server = await asyncio.start_unix_server(made.serve, made.path)
    try:
        yield made
    finally:
        server.close()
        for writer in made.writers:
            writer.close()


def consoles(folder: Path) -> Consoles:
    return Consoles(lambda _uid: folder / "console.sock", lambda _uid: folder / "console.log")


async def take(viewer: Viewer, size: int) -> bytes:
    """Return the next bytes of the guest, at least `size` of them or all."""
    seen = b""
    async for output in viewer.output():
        seen += output if isinstance(output, bytes) else b""
        if len(seen) >= size:
            break
    return seen


async def next_note(viewer: Viewer) -> str:
    async for output in viewer.output():
        if isinstance(output, str):
            return output
    return ""


async def test_keys_go_in_and_output_comes_out(folder: Path, serial: Serial) -> None:
    async with asyncio.timeout(5), consoles(folder).attach(UID) as viewer:
        await serial.attached.get()
        serial.writers[0].write(b"login: ")
        assert await take(viewer, 7) == b"login: "
        await viewer.write(b"root\n")
        while bytes(serial.heard) != b"root\n":
            await asyncio.sleep(0)


async def test_all_viewers_see_every_byte_over_one_connection(folder: Path, serial: Serial) -> None:
    door = consoles(folder)
    async with asyncio.timeout(10), AsyncExitStack() as stack:
        viewers = [await stack.enter_async_context(door.attach(UID)) for _ in range(10)]
        assert await serial.attached.get() == 1
        serial.writers[0].write(b"x" * 100_000)
        for viewer in viewers[1:]:  # the first one reads nothing
            assert await take(viewer, 100_000) == b"x" * 100_000
    assert len(serial.writers) == 1


async def test_the_last_writer_to_connect_writes_until_it_leaves(
    folder: Path, serial: Serial
) -> None:
    door = consoles(folder)
    async with asyncio.timeout(5), door.attach(UID, owner="ann") as first:
        await serial.attached.get()
        async with door.attach(UID, owner="bob") as second:
            assert await next_note(first) == "bob writes now; you can only read"
            await first.write(b"dropped")
            await second.write(b"kept")
            async with door.attach(UID, write=False) as third:
                await third.write(b"dropped")
        assert await next_note(first) == "you write now"
        await first.write(b" again")
        while bytes(serial.heard) != b"kept again":
            await asyncio.sleep(0)
    assert not door._ports


async def test_a_viewer_that_falls_behind_is_ended_and_the_others_continue(
    folder: Path, serial: Serial
) -> None:
    door = consoles(folder)
    async with asyncio.timeout(10), door.attach(UID) as slow, door.attach(UID) as fast:
        await serial.attached.get()
        chunk = b"x" * 65_536
        for _ in range(ROOM_BYTES // len(chunk) + 2):
            serial.writers[0].write(chunk)
            assert len(await take(fast, len(chunk))) >= len(chunk)
        assert await take(slow, 1) == b""
        assert slow.closed == FELL_BEHIND
        serial.writers[0].write(b"the end")
        assert (await take(fast, 7)).endswith(b"the end")
        serial.writers[0].close()
        assert await take(fast, 1) == b""
        assert fast.closed == "the guest stopped"


async def test_earlier_output_comes_first_and_nothing_twice(folder: Path, serial: Serial) -> None:
    (folder / "console.log").write_bytes(b"boot messages\nlogin: ")
    door = consoles(folder)
    async with asyncio.timeout(5), door.attach(UID, tail_bytes=7) as first:
        await serial.attached.get()
        serial.writers[0].write(b"root\n")
        assert await take(first, 12) == b"login: root\n"
        async with door.attach(UID, tail_bytes=1000) as second:
            assert await take(second, 26) == b"boot messages\nlogin: root\n"
        async with door.attach(UID) as third:
            serial.writers[0].write(b"more")
            assert await take(third, 4) == b"more"


async def test_five_hundred_attaches_leave_nothing(folder: Path, serial: Serial) -> None:
    door = consoles(folder)
    async with asyncio.timeout(15):
        for _ in range(500):
            async with door.attach(UID):
                pass
    assert not door._ports
    assert len(asyncio.all_tasks()) < 510


async def test_a_console_needs_a_running_guest(folder: Path) -> None:
    with pytest.raises(VirtbusError) as raised:
        async with consoles(folder).attach(UID):
            pass
    assert raised.value.reason == "no_console"
    assert "vm start" in str(raised.value)


async def test_an_error_of_the_client_comes_out_as_it_is(folder: Path, serial: Serial) -> None:
    with pytest.raises(KeyError):
        async with consoles(folder).attach(UID):
            raise KeyError


async def read(door: Consoles, *, tail_bytes: int = 65_536) -> bytes:
    chunks = [c async for c in door.read_log(UID, tail_bytes=tail_bytes, follow=False)]
    return b"".join(chunks)


async def test_the_log_gives_its_tail_and_no_symlink(folder: Path) -> None:
    door, log = consoles(folder), folder / "console.log"
    assert await read(door) == b""
    log.write_bytes(b"0123456789")
    assert await read(door, tail_bytes=4) == b"6789"
    assert await read(door, tail_bytes=-1) == b""
    log.rename(folder / "secret")
    log.symlink_to(folder / "secret")
    assert await read(door) == b""


async def test_a_followed_log_continues_after_its_rotation(folder: Path) -> None:
    door, log = consoles(folder), folder / "console.log"
    log.write_bytes(b"first line\n")
    seen = b""
    async with asyncio.timeout(10):
        async for data in door.read_log(UID, tail_bytes=100, follow=True):
            seen += data
            if seen == b"first line\n":
                log.rename(folder / "console.log.0")
                log.write_bytes(b"second\n")
            if seen.endswith(b"second\n"):
                break
    assert seen == b"first line\nsecond\n"


async def test_waiting_keys_are_dropped_if_another_viewer_writes_by_then(
    folder: Path, serial: Serial
) -> None:
    held = consoles(folder)
    async with asyncio.timeout(5), held.attach(UID) as first:
        await serial.attached.get()
        held._ports[UID].pause_writing()  # as asyncio does for a guest that reads nothing
        async with asyncio.TaskGroup() as group:
            group.create_task(first.write(b"rm -rf /\n"))
            await asyncio.sleep(0)
            async with held.attach(UID) as second:
                held._ports[UID].resume_writing()
                await second.write(b"whoami\n")
                while not serial.heard.endswith(b"whoami\n"):
                    await asyncio.sleep(0)
        assert serial.heard == b"whoami\n"
