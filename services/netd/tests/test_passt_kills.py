"""A netd that is killed at any step of an attach or release with passt leaves nothing behind."""

import asyncio

import pytest
from services.netd.tests.pretended_host import Host, Node
from services.netd.tests.test_passt import GATEWAY, PASST, running
from services.netd.tests.test_recovery import STEPS, A, gone, killed_at, release

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

WITH_PASST = STEPS | {"posix_spawn", "begun", "finish", "pidfd_send_signal", "_address", "_start"}


async def attach(host: Host) -> None:
    node = Node(host)
    await node.start()
    await node.attach(A, **PASST)
    node.stop()


async def all_is_well(host: Host) -> None:
    node = Node(host)
    await node.start()
    await node.attach(A, **PASST)
    assert len(running(A)) == 2
    async with node.guest(A) as guest:
        await guest.ping(GATEWAY)
    node.stop()


def test_after_a_kill_at_any_step_of_attach_the_next_one_works(host: Host) -> None:
    before = host.census()
    step = 0
    while killed_at(step := step + 1, lambda: attach(host), WITH_PASST):
        asyncio.run(all_is_well(host))
        asyncio.run(gone(host, census=before))
        assert running(A) == {}
    assert step > 30
    asyncio.run(gone(host, census=before))


def test_after_a_kill_at_any_step_of_release_the_next_leaves_nothing(host: Host) -> None:
    before = host.census()
    step = 0
    asyncio.run(attach(host))
    while killed_at(step := step + 1, lambda: release(host), WITH_PASST):
        asyncio.run(all_is_well(host))
    assert step > 10
    asyncio.run(gone(host, census=before))
    assert running(A) == {}
