"""When a guest counts as ready."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from virtbus.nodeagent.edge.reach import Reach
from virtbus.schemas.network import InterfaceStatus

UID = "0192f0c1-2d3e-7abc-8def-0123456789ab"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "console.log"


@pytest.fixture
async def reach(log: Path) -> AsyncIterator[Reach]:
    reach = Reach(lambda _uid: log)
    reach.open()
    yield reach
    reach.close()


def interface(*addresses: str) -> InterfaceStatus:
    return InterfaceStatus(
        name="a", network="default", mac="52:54:00:00:00:01", addresses=addresses
    )


async def test_a_guest_is_ready_when_its_console_says_so(reach: Reach, log: Path) -> None:
    log.write_text("booting\nGUEST-READY\n")
    assert await reach.answers(UID, tuple) == "GuestSaysReady"


async def test_what_the_console_says_later_counts_too(reach: Reach, log: Path) -> None:
    log.write_text("x" * 100_000)
    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        waiting = group.create_task(reach.answers(UID, tuple))
        await asyncio.sleep(0)  # it has looked once
        with log.open("a") as more:
            more.write("GUEST-READY\n")
    assert waiting.result() == "GuestSaysReady"


async def test_what_the_console_said_before_a_reboot_does_not_count(
    reach: Reach, log: Path
) -> None:
    log.write_text("GUEST-READY\n")
    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        waiting = group.create_task(reach.answers(UID, tuple, rebooted=True))
        await asyncio.sleep(0.6)  # it looks each quarter of a second
        assert not waiting.done()
        with log.open("a") as more:
            more.write("booting\nGUEST-READY\n")
    assert waiting.result() == "GuestSaysReady"


async def test_a_silent_guest_is_not_ready(reach: Reach) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.6):
            await reach.answers(UID, lambda: (interface("fd00::1/64"),))


@pytest.mark.integration
@pytest.mark.skipif(os.geteuid() != 0, reason="a raw socket")
async def test_an_address_that_answers_a_ping_is_a_sign_of_life(reach: Reach) -> None:
    async with asyncio.timeout(5):
        found = await reach.answers(UID, lambda: (interface("fd00::1/64", "127.0.0.1/8"),))
    assert found == "AddressAnswers"
