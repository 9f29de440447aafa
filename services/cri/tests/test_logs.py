"""The log of a container: CRI's format, rotation, restarts, and hostile guests."""

import asyncio
import errno
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from grpc import StatusCode
from grpc.aio import AioRpcError
from hypothesis import given
from hypothesis import strategies as st
from services.cri.tests.world import Fleet, Kubelet, cri

from virtbus.bus.runtime.sources import REAL
from virtbus.cri.core.log_lines import LINE_BYTES, LogLines
from virtbus.cri.edge.console_follower import ConsoleFollower

LINE = re.compile(rb"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{9}Z stdout ([FP]) (.*)")
STAMP = "2026-11-24T10:00:00.000000001Z"


def texts(log: bytes) -> bytes:
    """Return the text of CRI's log, as kubelet shows it."""
    shown = b""
    for line in log.removesuffix(b"\n").split(b"\n") if log else []:
        match = LINE.fullmatch(line)
        assert match, line
        shown += match[2] + (b"\n" if match[1] == b"F" else b"")
    return shown


def test_lines_have_the_format_of_cri() -> None:
    lines = LogLines()
    assert lines.feed(b"one\r\ntwo", STAMP) == f"{STAMP} stdout F one\n".encode()
    assert lines.pending == 3
    assert lines.flush(STAMP) == f"{STAMP} stdout P two\n".encode()
    assert lines.flush(STAMP) == b""


@given(st.lists(st.binary(max_size=40_000), max_size=6))
def test_no_byte_of_a_guest_is_lost_and_memory_is_bounded(pieces: list[bytes]) -> None:
    lines, log = LogLines(), b""
    whole = b"".join(piece.replace(b"\r", b"") for piece in pieces)
    for piece in pieces:
        log += lines.feed(piece.replace(b"\r", b""), STAMP)
        assert lines.pending <= LINE_BYTES
    log += lines.flush(STAMP)
    assert texts(log) == whole
    assert max(map(len, log.split(b"\n"))) <= LINE_BYTES + 64


class Guest:
    """A guest that writes to its console's file."""

    def __init__(self, folder: Path, fleet: Fleet, kubelet: Kubelet) -> None:
        self.fleet, self.kubelet = fleet, kubelet
        self.pods = folder / "pods"
        self.consoles = folder / "state" / "consoles"
        self.container_id = ""

    @property
    def console(self) -> Path:
        return self.consoles / f"{self.fleet.vm.uid}.log"

    def new_boot(self, text: bytes) -> None:
        """Begin a console, as the agent does for each start."""
        self.consoles.mkdir(parents=True, exist_ok=True)
        if self.console.exists():
            self.console.replace(self.console.with_suffix(".log.previous"))
        self.console.write_bytes(text)

    def say(self, text: bytes) -> None:
        with self.console.open("ab") as console:
            console.write(text)

    def log(self, attempt: int = 0) -> bytes:
        path = self.pods / "vm" / f"{attempt}.log"
        return path.read_bytes() if path.exists() else b""

    async def until(self, text: bytes, attempt: int = 0) -> None:
        """Wait until the log shows the text."""
        while texts(self.log(attempt)) != text:
            await asyncio.sleep(0.02)

    async def reopened(self) -> StatusCode:
        """Call ReopenContainerLog; return its status."""
        try:
            await self.kubelet.call("ReopenContainerLog", container_id=self.container_id)
        except AioRpcError as error:
            return error.code()
        return StatusCode.OK


@asynccontextmanager
async def guest(folder: Path, fleet: Fleet) -> AsyncIterator[Guest]:
    """Run a pod whose guest has said `hello`."""
    async with cri(folder, fleet) as kubelet:
        here = Guest(folder, fleet, kubelet)
        sandbox_id = await kubelet.sandbox(log_directory=str(here.pods))
        here.container_id = await kubelet.container(sandbox_id)
        here.new_boot(b"")
        await kubelet.call("StartContainer", container_id=here.container_id)
        here.new_boot(b"hello\n")
        await here.until(b"hello\n")
        yield here


async def test_a_log_follows_the_console(tmp_path: Path, fleet: Fleet) -> None:
    async with guest(tmp_path, fleet) as here:
        status = await here.kubelet.status(here.container_id)
        assert status.log_path == str(here.pods / "vm" / "0.log")
        here.say(b"login: ")  # a prompt has no line break
        await here.until(b"hello\nlogin: ")


async def test_a_rotated_log_goes_on_in_a_new_file(tmp_path: Path, fleet: Fleet) -> None:
    async with guest(tmp_path, fleet) as here:
        path = here.pods / "vm" / "0.log"
        path.rename(here.pods / "vm" / "0.log.1")
        await here.kubelet.call("ReopenContainerLog", container_id=here.container_id)
        here.say(b"after\n")
        await here.until(b"after\n")
        assert texts((here.pods / "vm" / "0.log.1").read_bytes()) == b"hello\n"


async def test_a_restart_of_the_cri_loses_and_repeats_nothing(tmp_path: Path, fleet: Fleet) -> None:
    async with guest(tmp_path, fleet) as here:
        pass
    here.say(b"meanwhile\n")
    fleet.away = True
    async with cri(tmp_path, fleet):
        await here.until(b"hello\nmeanwhile\n")
        here.say(b"later\n")
        await here.until(b"hello\nmeanwhile\nlater\n")


async def test_each_attempt_has_the_output_of_its_own_run(tmp_path: Path, fleet: Fleet) -> None:
    async with guest(tmp_path, fleet) as here:
        kubelet = here.kubelet
        here.say(b"bye")
        await kubelet.call("StopContainer", container_id=here.container_id)
        await here.until(b"hello\nbye")
        (sandbox,) = (await kubelet.call("ListPodSandbox")).items
        second = await kubelet.container(sandbox.id, attempt=1)
        await kubelet.call("StartContainer", container_id=second)
        here.new_boot(b"again\n")
        await here.until(b"again\n", attempt=1)
        assert texts(here.log()) == b"hello\nbye"


async def test_a_stopped_container_has_no_log_to_reopen(tmp_path: Path, fleet: Fleet) -> None:
    async with guest(tmp_path, fleet) as here:
        await here.kubelet.call("StopContainer", container_id=here.container_id)
        code = await here.reopened()
        while code is StatusCode.OK:
            code = await here.reopened()
        assert code is StatusCode.FAILED_PRECONDITION


async def test_a_disk_that_was_full_for_a_while_costs_the_log_no_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    console, path, write = tmp_path / "console", tmp_path / "0.log", os.write
    free = [30]  # the number of bytes until the disk is full

    def full(descriptor: int, data: bytes) -> int:
        written = write(descriptor, data[: free[0]])
        free[0] -= written
        if not written:
            raise OSError(28, "No space left on device")
        return written

    console.write_bytes(b"abc\ndef")
    follower = ConsoleFollower(console, path, tmp_path / "place", REAL)
    follower.begin(fresh=False)
    monkeypatch.setattr(os, "write", full)
    running = asyncio.Task(follower.run())
    await asyncio.sleep(1.0)
    assert len(caplog.records) == 1
    free[0] = 34  # the rest of the line, and a piece of the unfinished line's part
    while free[0]:
        await asyncio.sleep(0.05)
    free[0] = 10_000
    with console.open("ab") as guest:
        guest.write(b"ghi\n")
    while not path.read_bytes().endswith(b"ghi\n"):
        await asyncio.sleep(0.05)
    running.cancel()
    follower.close()
    assert texts(path.read_bytes()) == b"abc\ndefghi\n"


async def test_a_failing_disk_at_the_end_of_a_guest_ends_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    console, path = tmp_path / "console", tmp_path / "0.log"
    console.write_bytes(b"abc\n")
    follower = ConsoleFollower(console, path, tmp_path / "place", REAL)
    follower.begin(fresh=False)

    def broken(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Path, "unlink", broken)
    follower.finish()
    follower.close()
    assert texts(path.read_bytes()) == b"abc\n"
    assert "Input/output error" in caplog.text
