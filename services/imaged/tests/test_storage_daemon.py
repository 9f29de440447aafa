"""A storage daemon that dies is an error of its job, and none of imaged."""

import asyncio

import uvloop

from virtbus.imaged.edge import storage_daemon


def test_a_daemon_that_was_killed_is_told_nothing_more() -> None:
    async def body() -> None:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec("sleep", "60", stdin=pipe, stdout=pipe)
        process.kill()
        await process.wait()
        assert process.stdin is not None
        while not process.stdin.is_closing():
            await asyncio.sleep(0.01)
        why = await storage_daemon._run(process, (), ("block-stream", {}), _look)
        assert why == "the daemon ended before its job"

    async def _look() -> None:
        return None

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(body())
