"""The readiness of a guest."""

import asyncio
import os
import struct
import sys
import time
from pathlib import Path

import pytest

from virtbus.nodeagent.edge import readiness_probe as reach_module
from virtbus.nodeagent.edge.readiness_probe import ReadinessProbe
from virtbus.schemas.network import InterfaceStatus

UID = "0192f0c1-2d3e-7abc-8def-0123456789ab"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "console.log"


@pytest.fixture
def reach(log: Path) -> ReadinessProbe:
    return ReadinessProbe(lambda _uid: log)


def interface(*addresses: str) -> InterfaceStatus:
    return InterfaceStatus(
        name="a", network="default", mac="52:54:00:00:00:01", addresses=addresses
    )


async def test_a_guest_is_ready_when_its_console_shows_the_word(
    reach: ReadinessProbe, log: Path
) -> None:
    log.write_text("booting\nGUEST-READY\n")
    assert await reach.answers(UID, tuple) == "GuestSaysReady"


async def test_later_console_output_counts_too(reach: ReadinessProbe, log: Path) -> None:
    log.write_text("x" * 100_000)
    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        waiting = group.create_task(reach.answers(UID, tuple))
        await asyncio.sleep(0)  # it has looked once
        with log.open("a") as more:
            more.write("GUEST-READY\n")
    assert waiting.result() == "GuestSaysReady"


async def test_console_output_from_before_a_reboot_does_not_count(
    reach: ReadinessProbe, log: Path
) -> None:
    log.write_text("GUEST-READY\n")
    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        waiting = group.create_task(reach.answers(UID, tuple, rebooted=True))
        await asyncio.sleep(0.6)  # it looks each quarter of a second
        assert not waiting.done()
        with log.open("a") as more:
            more.write("booting\nGUEST-READY\n")
    assert waiting.result() == "GuestSaysReady"


async def test_output_in_a_new_console_log_counts_after_a_reboot(
    reach: ReadinessProbe, log: Path
) -> None:
    """virtlogd rotates the log while the guest boots."""
    log.write_text("x" * 100_000)
    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        waiting = group.create_task(reach.answers(UID, tuple, rebooted=True))
        await asyncio.sleep(0)  # it has looked once
        log.write_text("GUEST-READY\n")
    assert waiting.result() == "GuestSaysReady"


async def test_a_silent_guest_is_not_ready(reach: ReadinessProbe) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.6):
            await reach.answers(UID, lambda: (interface("fd00::1/64"),))


@pytest.mark.integration
@pytest.mark.skipif(os.geteuid() != 0, reason="a raw socket")
async def test_an_address_that_answers_a_ping_is_a_sign_of_life(reach: ReadinessProbe) -> None:
    async with asyncio.timeout(5):
        found = await reach.answers(UID, lambda: (interface("fd00::1/64", "127.0.0.1/8"),))
    assert found == "AddressAnswers"


FLOOD = """
import socket, struct
flood = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
flood.bind(("127.0.0.9", 0))
reply = struct.pack(">BBHHH", 0, 0, 0xFFFF, 0, 0)
while True:
    flood.sendto(reply, ("127.0.0.1", 0))
"""


@pytest.mark.integration
@pytest.mark.skipif(os.geteuid() != 0, reason="a raw socket")
async def test_a_flood_of_one_guests_replies_is_not_read_for_another(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unanswered = struct.pack(">BBHHH", 8, 0, 0xFFFF, 0, 0)  # its checksum is wrong
    monkeypatch.setattr(reach_module, "_echo_request", lambda: unanswered)
    reach = ReadinessProbe(lambda _uid: log)
    flood = await asyncio.create_subprocess_exec(sys.executable, "-c", FLOOD)
    try:
        await asyncio.sleep(0.5)
        begun_s = time.thread_time()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2):
                await reach.answers(UID, lambda: (interface("127.0.0.10/8"),))
        assert time.thread_time() - begun_s < 0.2
        async with asyncio.timeout(5):  # the flooding guest is ready, and costs one datagram
            found = await reach.answers(UID, lambda: (interface("127.0.0.9/8"),))
        assert found == "AddressAnswers"
    finally:
        flood.kill()
        await flood.wait()
