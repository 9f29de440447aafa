"""One job at a time for each operation, also with several requests and after failures."""

import asyncio

import pytest

from virtbus.imaged.disk_jobs import DiskJobs, Job
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.node_rpc import WorkState


async def test_two_requests_that_wait_for_a_failing_job_begin_one_more_at_most() -> None:
    running = most = begun = 0

    async def nothing_is_done() -> WorkState | None:
        return None

    async def fails(_: Job) -> None:
        nonlocal running, most, begun
        begun += 1
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.02)
        running -= 1
        raise VirtbusError(Code.INVALID, "invalid", "it cannot be done")

    async with asyncio.TaskGroup() as group:
        jobs = DiskJobs(group)

        async def ask() -> None:
            for _ in range(5):
                with pytest.raises(VirtbusError, match="it cannot be done"):
                    await jobs.ensure("1", "1", nothing_is_done, fails, soon_s=10)

        async with asyncio.TaskGroup() as askers:
            for _ in range(3):
                askers.create_task(ask())
        assert await jobs.end("1") is None
    assert most == 1, f"{begun} begun"
