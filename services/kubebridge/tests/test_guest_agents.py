"""Guest agents are polled: each minute if they answer, otherwise at growing intervals."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from services.kubebridge.tests.manifests import UID
from services.kubebridge.tests.world import view

from virtbus.bus.client.memory_bus import MemoryBus, MemoryServer
from virtbus.bus.client.ports import Endpoint, Request, ServiceInfo
from virtbus.bus.runtime.tasks import background
from virtbus.kubebridge.core.runtime.controller import GUEST_AGENT, Key
from virtbus.kubebridge.edge.guest_agents import NORMAL, Delays, GuestAgentPoller
from virtbus.kubebridge.edge.runtime.vm_informer import VmInformer
from virtbus.kubebridge.edge.runtime.workqueue import WorkQueue
from virtbus.schemas import subjects
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.guest import GuestInfo, GuestOs
from virtbus.schemas.states import VmState

INFO = GuestInfo(os=GuestOs(id="debian"))


def test_a_guest_without_an_agent_is_polled_at_growing_intervals() -> None:
    up_s, asks = 10.0, 0
    while up_s < 24 * 3600:
        up_s += NORMAL.silent_s(up_s)
        asks += 1
    assert asks < 310
    assert [NORMAL.silent_s(up) for up in (0, 30, 100, 10_000)] == [10, 15, 50, 300]


class Asked:
    """A node whose guests give `answer`. It counts the polls."""

    def __init__(self, bus: MemoryBus, views: VmInformer) -> None:
        self.answer: GuestInfo | VirtbusError = INFO
        self.count = 0
        leads = asyncio.Event()
        leads.set()
        self.views = views
        self.changed: asyncio.Queue[str] = asyncio.Queue()
        self.asks = GuestAgentPoller(bus, views, Delays(0.01, 0.01, 0.01))
        self.queue = WorkQueue(leads)
        self.queue.add_lane(GUEST_AGENT, self.asks.lane())
        self.asks.notify = self.changed.put_nowait

    async def guest(self, _: Request) -> Any:
        self.count += 1
        if isinstance(self.answer, VirtbusError):
            raise self.answer
        return self.answer


@asynccontextmanager
async def asked(state: VmState) -> AsyncIterator[Asked]:
    bus = MemoryBus(MemoryServer())
    views = VmInformer(bus, "c1")
    views.answered(view(UID, state=state))
    here = Asked(bus, views)
    endpoint = Endpoint("guest", subjects.rpc("n1", "agent", "guest"), here.guest)
    async with bus.serve(ServiceInfo("agent", "1.0.0"), [endpoint]), background() as tasks:
        tasks.start(here.queue.run())
        here.queue.add(Key(GUEST_AGENT, "default", "kubevirt-smoke-fedora"))
        async with asyncio.timeout(30):
            yield here
    await bus.aclose()


async def test_an_answer_is_stored_and_a_change_is_notified() -> None:
    async with asked(VmState.RUNNING) as here:
        assert not here.asks.asked(UID)
        key = await here.changed.get()
        assert key == "default/kubevirt-smoke-fedora"
        assert (here.asks.get(UID), here.asks.asked(UID)) == (INFO, True)
        while here.count < 3:
            await asyncio.sleep(0.01)
        assert here.changed.empty()
        here.answer = VirtbusError(Code.CONFLICT, "guest_agent_absent", "none")
        await here.changed.get()
        assert here.asks.get(UID) is None
        here.answer = INFO
        await here.changed.get()
        assert here.asks.get(UID) == INFO


@pytest.mark.parametrize(
    "error",
    [
        VirtbusError(Code.UNAVAILABLE, "recovering", "the agent starts"),
        VirtbusError(Code.INTERNAL, "failed", "the agent fails"),
        VirtbusError(Code.UNAVAILABLE, "guest_agent_silent", "the guest is busy"),
    ],
    ids=lambda error: error.reason,
)
async def test_a_failure_that_proves_nothing_keeps_the_last_answer(error: VirtbusError) -> None:
    async with asked(VmState.RUNNING) as here:
        await here.changed.get()
        here.answer = error
        polls = here.count
        while here.count == polls:
            await asyncio.sleep(0.001)
        here.answer = INFO
        await asyncio.sleep(0.05)
        assert here.changed.empty()


async def test_a_guest_that_is_silent_twice_has_no_agent_until_it_answers() -> None:
    async with asked(VmState.RUNNING) as here:
        await here.changed.get()
        here.answer = VirtbusError(Code.UNAVAILABLE, "guest_agent_silent", "no answer")
        await here.changed.get()
        assert here.asks.get(UID) is None
        here.answer = INFO
        await here.changed.get()
        assert here.asks.get(UID) == INFO


async def test_a_stopped_guest_is_not_polled() -> None:
    async with asked(VmState.PREPARING) as here:
        await here.changed.get()
        assert (here.asks.get(UID), here.asks.asked(UID), here.count) == (None, True, 0)


async def test_the_state_of_a_deleted_guest_is_dropped() -> None:
    async with asked(VmState.RUNNING) as here:
        await here.changed.get()
        here.views.ended(UID)
        while here.asks.asked(UID):
            await asyncio.sleep(0.01)
        assert here.asks.get(UID) is None


async def test_each_of_many_guests_is_polled() -> None:
    uids = [f"{UID[:-2]}{number:02x}" for number in range(20)]
    async with asked(VmState.RUNNING) as here:
        for uid in uids:
            here.views.answered(view(uid, name=uid, state=VmState.RUNNING))
            here.queue.add(Key(GUEST_AGENT, "default", uid))
        while not all(here.asks.asked(uid) for uid in uids):
            await asyncio.sleep(0.01)
