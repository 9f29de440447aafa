"""Background tasks begin only while their context lasts."""

import inspect

import pytest

from virtbus.bus.runtime.tasks import background


@pytest.mark.filterwarnings("error")
async def test_work_after_the_end_is_refused_and_closed() -> None:
    async def work() -> None:
        pytest.fail("it runs after the end")

    async with background() as tasks:
        pass
    late = work()
    with pytest.raises(RuntimeError):
        tasks.start(late)
    assert inspect.getcoroutinestate(late) == inspect.CORO_CLOSED
