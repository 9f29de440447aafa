"""Repeated messages, and services that sleep longer than every lease (F32, F41)."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
from tests.chaos.lives import Lives, Wanted
from tests.chaos.simulated import Simulated, simulated
from tests.e2e.platform import NODE, until

from virtbus.bus.client.nats_bus import NatsBus

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(180)]

AGAIN = "Chaos-Again"
"""Marks our repeats, so that each message is repeated only once."""
REPEATS_S = 10.0
ASLEEP_S = 30.0
"""Longer than the heartbeat TTL (15 s), the leader lease (15 s) and silence (25 s)."""


@pytest.fixture(scope="module")
def _platform() -> Iterator[Simulated]:
    with simulated() as held:
        held.quiet = held.census()
        yield held


@pytest.fixture
def platform(_platform: Simulated) -> Iterator[Simulated]:
    yield _platform
    _platform.wait_whole()
    _platform.nothing_left()


async def _repeat(bus: NatsBus, subject: str) -> None:
    """Publish every message of a filter twice more; answers to the repeats are discarded."""
    async with bus.subscribe(subject) as messages:
        async for message in messages:
            if AGAIN in message.headers or ".rpc." in message.subject.partition(".report.")[0]:
                continue
            headers = {**message.headers, AGAIN: "1"}
            headers.pop("Nats-Msg-Id", None)
            for pause_s in (0.0, 0.2):
                await asyncio.sleep(pause_s)
                with suppress(Exception):
                    await bus._link.send(message.subject, message.body, headers=headers)


async def _repeat_requests(bus: NatsBus, subject: str) -> None:
    """Send every request twice more; the answers go to an inbox without a reader."""
    async with bus.subscribe(subject) as messages:
        async for message in messages:
            if AGAIN in message.headers:
                continue
            headers = {**message.headers, AGAIN: "1"}
            for _ in range(2):
                await bus._link.send(
                    message.subject, message.body, headers=headers, reply=bus._link.inbox()
                )


def test_every_message_three_times_has_the_effect_of_one(platform: Simulated) -> None:
    lives = Lives(seed=1, simulate=True)

    async def live() -> None:
        async with (
            platform.bus("admin") as admin,
            platform.bus() as bus,
            asyncio.TaskGroup() as group,
        ):
            repeating = [
                group.create_task(_repeat(admin, f"virtbus.node.{NODE}.>")),
                group.create_task(_repeat_requests(admin, f"virtbus.node.{NODE}.rpc.>")),
                group.create_task(_repeat_requests(admin, "virtbus.api.v1.vm.>")),
            ]
            living = group.create_task(lives.run(bus, at_once=4))
            await asyncio.sleep(REPEATS_S)
            lives.over.set()
            await living
            for task in repeating:
                task.cancel()

    asyncio.run(live())
    assert lives.done["create"] >= 4
    shown = {vm["uid"]: vm["state"] for vm in platform.vms()}
    left = {u: str(life.wanted) for u, life in lives.known.items() if life.wanted != Wanted.GONE}
    assert shown == left


def test_an_agent_that_slept_longer_than_every_lease_acts_on_the_current_state(
    platform: Simulated,
) -> None:
    platform.create("stays")
    platform.create("goes")
    pid = platform.pid("simulator")
    os.kill(pid, signal.SIGSTOP)
    begun = time.monotonic()
    try:
        platform.ask("vm.delete", {"name": "goes", "grace_s": 0})
        until(
            lambda: "Unknown" in {vm["state"] for vm in platform.vms()},
            "a VM whose node is silent is shown as Unknown",
        )
        time.sleep(max(0.0, begun + ASLEEP_S - time.monotonic()))
    finally:
        os.kill(pid, signal.SIGCONT)
    until(lambda: [vm["name"] for vm in platform.vms()] == ["stays"], "goes is gone")
    platform.wait_state("stays", "Running")
    assert platform.pid("simulator") == pid
    platform.create("next")
