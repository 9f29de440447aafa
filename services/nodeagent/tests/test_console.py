"""Consoles over a socket that plays QEMU's: a hostile guest, clients that come, go and stay."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from virtbus.nodeagent.edge.console import BUFFER_BYTES, Consoles
from virtbus.schemas.errors import VirtbusError

UID = "0192f0c1-2d3e-7abc-8def-0123456789ab"


@dataclass
class Serial:
    """QEMU's end: one connection at a time, as its server sockets are."""

    path: Path
    writers: list[asyncio.StreamWriter] = field(default_factory=list)
    heard: bytearray = field(default_factory=bytearray)
    attached: asyncio.Queue[int] = field(default_factory=asyncio.Queue)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        self.attached.put_nowait(len(self.writers))
        while data := await reader.read(4096):
            self.heard += data
        writer.close()


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


async def test_keys_go_in_and_output_comes_out(folder: Path, serial: Serial) -> None:
    async with asyncio.timeout(5), consoles(folder).attach(UID) as session:
        await serial.attached.get()
        serial.writers[0].write(b"login: ")
        async for data in session.output():
            assert data == b"login: "
            break
        await session.write(b"root\n")
        while bytes(serial.heard) != b"root\n":
            await asyncio.sleep(0)


async def test_a_second_client_takes_over_from_one_that_does_not_read(
    folder: Path, serial: Serial
) -> None:
    door = consoles(folder)
    async with asyncio.timeout(5), door.attach(UID) as first:
        await serial.attached.get()
        async with door.attach(UID) as second:
            await serial.attached.get()
            assert first.closed == "taken over by another client"
            assert [data async for data in first.output()] == []
            await first.write(b"lost")
            await second.write(b"kept")
            while bytes(serial.heard) != b"kept":
                await asyncio.sleep(0)
    assert not door._sessions


async def test_a_flood_is_bounded_and_the_newest_is_kept(folder: Path, serial: Serial) -> None:
    async with asyncio.timeout(10), consoles(folder).attach(UID) as session:
        await serial.attached.get()
        for number in range(64):
            serial.writers[0].write(bytes([65 + number % 26]) * 65_536)
            await serial.writers[0].drain()
        serial.writers[0].write(b"the end")
        serial.writers[0].close()
        while not session.closed:
            await asyncio.sleep(0)
        seen = b"".join([data async for data in session.output()])
        assert len(seen) == BUFFER_BYTES
        assert seen.endswith(b"the end")
        assert session.closed == "the guest stopped"


async def test_five_hundred_attaches_leave_nothing(folder: Path, serial: Serial) -> None:
    door = consoles(folder)
    async with asyncio.timeout(15):
        for _ in range(500):
            async with door.attach(UID):
                pass
    assert not door._sessions
    assert len(asyncio.all_tasks()) < 510


async def test_no_guest_no_console(folder: Path) -> None:
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


async def test_a_followed_log_goes_on_after_its_rotation(folder: Path) -> None:
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
