"""A worker does its step for each VM: one attempt at a time, repeated, replaced, dropped."""

import asyncio
from collections.abc import AsyncIterator, Mapping

import pytest

from virtbus.bus.client import record_worker
from virtbus.bus.client.memory_bus import MemoryBus, MemoryServer
from virtbus.bus.client.ports import Entry, EntryKind, WatchMark
from virtbus.bus.client.record_worker import Ensured, RecordWorker
from virtbus.bus.client.step_reporter import StepEvents, StepReporter
from virtbus.bus.client.tracing import no_span
from virtbus.bus.runtime.tasks import Background, background
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.events import EventKind
from virtbus.schemas.node_rpc import ANY_EPOCH, ImageReady, NetReady, Release
from virtbus.schemas.subjects import vm_record
from virtbus.schemas.vm import VmRecord, VmSpec
from virtbus.schemas.wire import encode

A = "0192f0c1-2d3e-7abc-8def-00000000000a"
LATE = VirtbusError(Code.UNAVAILABLE, "image_unreachable", "later")
NEVER = VirtbusError(Code.INVALID, "disk_too_small", "never")


def record(generation: int = 1, epoch: int = 1) -> VmRecord:
    return VmRecord(
        uid=A, namespace="default", name="web", node="n1", created_ns=1,
        spec=VmSpec(), spec_hash="0" * 64, epoch=epoch, generation=generation,
    )  # fmt: skip


class Reporter(StepReporter):
    """Keeps what it would publish."""

    def __init__(self) -> None:
        names = StepEvents(
            "image", EventKind.IMAGE_READY, EventKind.IMAGE_FAILED, EventKind.DISKS_RELEASED
        )
        super().__init__(MemoryBus(MemoryServer()), "tester", "n1", names)
        self.published: list[ImageReady | NetReady] = []
        self.failures: list[tuple[str, int]] = []
        self.successes = 0

    async def ready(self, ready: ImageReady | NetReady) -> None:
        self.published.append(ready)

    def made(self, record: VmRecord, took_ms: float, detail: Mapping[str, str]) -> None:
        self.successes += 1

    def failed(self, record: VmRecord, error: VirtbusError, attempt: int) -> None:
        self.failures.append((error.reason, attempt))


class Step:
    """Waits for `go_on` in each attempt, and fails with each of `failures` in turn."""

    name, span = "make it", "virtbus make it"
    first_retry_s = 0.02

    def __init__(self, *failures: Exception, interrupts: bool = False) -> None:
        self.failures = list(failures)
        self.interrupts = interrupts
        self.begun: asyncio.Queue[int] = asyncio.Queue()
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.reporter = Reporter()

    def follows(self, record: VmRecord) -> bool:
        return not record.ending

    def forgets(self, uid: str) -> None:
        """Keep nothing."""

    async def ensure(self, record: VmRecord, logins: Mapping[str, str]) -> Ensured[ImageReady]:
        self.begun.put_nowait(record.generation)
        await self.go_on.wait()
        if self.failures:
            raise self.failures.pop(0)
        ready = ImageReady(uid=record.uid, epoch=record.epoch, generation=record.generation)
        return Ensured(ready, {"digest": "sha256:0"})

    def refusal(self, record: VmRecord, error: VirtbusError) -> ImageReady:
        uid, epoch, generation = record.uid, record.epoch, record.generation
        return ImageReady(uid=uid, epoch=epoch, generation=generation, error=error.body)


@pytest.fixture
async def tasks() -> AsyncIterator[Background]:
    async with background() as group:
        yield group


def worker(tasks: Background, step: Step) -> RecordWorker[ImageReady]:
    return RecordWorker(tasks._group, step, step.reporter, no_span)


async def published(step: Step, count: int) -> list[str]:
    async with asyncio.timeout(5):
        while len(step.reporter.published) < count:
            await asyncio.sleep(0.005)
    return [ready.error.reason if ready.error else "done" for ready in step.reporter.published]


async def test_a_temporary_failure_is_repeated_until_it_is_done(tasks: Background) -> None:
    step = Step(LATE, LATE)
    worker(tasks, step).want(record())
    assert await published(step, 3) == ["image_unreachable", "image_unreachable", "done"]
    assert step.reporter.failures == [("image_unreachable", 1), ("image_unreachable", 2)]
    assert step.reporter.successes == 1


async def test_a_permanent_failure_waits_for_a_request(tasks: Background) -> None:
    step = Step(NEVER)
    work = worker(tasks, step)
    work.want(record())
    await published(step, 1)
    await asyncio.sleep(0.1)
    assert len(step.reporter.published) == 1
    assert (await work.ensure(record())).error is None


async def test_an_unforeseen_failure_is_published_and_repeated(tasks: Background) -> None:
    step = Step(RuntimeError("no such thing"))
    worker(tasks, step).want(record())
    assert await published(step, 2) == ["internal", "done"]
    error = step.reporter.published[0].error
    assert error is not None
    assert error.message == "tester failed to make it; see its log"


async def test_requests_share_the_attempt_of_their_record(tasks: Background) -> None:
    step = Step(LATE)
    step.go_on.clear()
    work = worker(tasks, step)
    async with asyncio.TaskGroup() as group:
        asked = [group.create_task(work.ensure(record())) for _ in range(3)]
        await step.begun.get()
        step.go_on.set()
    errors = [one.result().error for one in asked]
    assert [error.reason for error in errors if error] == ["image_unreachable"] * 3
    assert len(step.reporter.published) == 1


@pytest.mark.parametrize("slow", [True, False])
async def test_a_message_repeats_a_successful_answer_only_if_that_may_be_late(
    tasks: Background, monkeypatch: pytest.MonkeyPatch, *, slow: bool
) -> None:
    if slow:
        monkeypatch.setattr(record_worker, "ANSWERED_S", 0.0)
    step = Step()
    work = worker(tasks, step)
    assert (await work.ensure(record())).error is None
    assert (await work.join_or_attempt(record())).error is None
    assert len(step.reporter.published) == (2 if slow else 0)


async def test_a_request_joins_a_running_attempt_and_does_not_wait_for_a_retry(
    tasks: Background,
) -> None:
    step = Step(LATE)
    step.first_retry_s = 60.0
    step.go_on.clear()
    work = worker(tasks, step)
    work.want(record())
    await step.begun.get()
    async with asyncio.TaskGroup() as group:
        joined = group.create_task(work.join_or_attempt(record()))
        await asyncio.sleep(0)
        step.go_on.set()
    refused = joined.result().error
    assert refused is not None
    assert refused.reason == "image_unreachable"
    assert step.begun.empty()
    assert (await work.join_or_attempt(record())).error is None
    work.drop(A)


@pytest.mark.parametrize("interrupts", [True, False])
async def test_a_newer_record_replaces_the_older_one(
    tasks: Background, *, interrupts: bool
) -> None:
    step = Step(interrupts=interrupts)
    step.go_on.clear()
    work = worker(tasks, step)
    work.want(record(1))
    assert await step.begun.get() == 1
    work.want(record(2))
    if interrupts:
        assert await step.begun.get() == 2
    step.go_on.set()
    await published(step, 1 if interrupts else 2)
    assert [ready.generation for ready in step.reporter.published] == (
        [2] if interrupts else [1, 2]
    )


async def test_an_older_record_changes_nothing(tasks: Background) -> None:
    step = Step()
    step.go_on.clear()
    work = worker(tasks, step)
    work.want(record(2))
    await step.begun.get()
    work.want(record(1))
    refused = await work.ensure(record(1))
    assert refused.error is not None
    assert refused.error.reason == "stale_epoch"
    step.go_on.set()
    await published(step, 1)
    assert step.reporter.published[0].generation == 2


async def test_a_release_ends_the_work_up_to_its_epoch_only(tasks: Background) -> None:
    step = Step()
    step.go_on.clear()
    work = worker(tasks, step)
    work.want(record(epoch=2))
    await step.begun.get()
    assert work.end(Release(uid=A, epoch=1)) == A
    async with asyncio.TaskGroup() as group:
        asked = group.create_task(work.ensure(record(epoch=2)))
        await asyncio.sleep(0)
        work.end(Release(uid=A, epoch=2))
    error = asked.result().error
    assert error is not None
    assert error.reason == "record_changed"
    work.listed.add(A)
    with pytest.raises(VirtbusError) as caught:
        work.end(Release(uid=A, epoch=ANY_EPOCH))
    assert caught.value.reason == "record_stands"


class Items:
    """A watch whose items a test gives."""

    def __init__(self) -> None:
        self._items: asyncio.Queue[Entry | WatchMark] = asyncio.Queue()
        self.relists = 0

    def give(self, *items: int | bytes | WatchMark) -> None:
        """Give marks, and records by their generation or value."""
        for one in items:
            if isinstance(one, WatchMark):
                self._items.put_nowait(one)
                continue
            value = one if isinstance(one, bytes) else encode(record(one))
            entry = Entry(vm_record("n1", A), value, 1, EntryKind.PUT, 0)
            self._items.put_nowait(entry)

    def __aiter__(self) -> AsyncIterator[Entry | WatchMark]:
        return self

    async def __anext__(self) -> Entry | WatchMark:
        return await self._items.get()

    def relist(self) -> None:
        """Only count: the test decides."""
        self.relists += 1


async def test_a_list_is_worked_on_when_it_is_complete(tasks: Background) -> None:
    step, watch = Step(), Items()
    work = worker(tasks, step)
    tasks.start(work.follow(watch, "n1"))
    watch.give(WatchMark.RESET, 1)
    assert await work.newest(record(1), 0.05) is None
    assert step.begun.empty()
    watch.give(2, WatchMark.SYNCED)
    assert await work.newest(record(1), 5) == record(2)
    assert await step.begun.get() == 2
    assert await work.newest(record(3), 0.05) is None
    watch.give(3)
    assert await work.newest(record(3), 5) == record(3)
    assert await step.begun.get() == 3


async def test_only_a_change_of_the_vms_parts_or_a_list_starts_the_step_again(
    tasks: Background,
) -> None:
    step, watch = Step(), Items()
    tasks.start(worker(tasks, step).follow(watch, "n1"))
    watch.give(WatchMark.RESET, 1, WatchMark.SYNCED)
    assert await published(step, 1) == ["done"]
    for field, value in {"powered": False, "power_epoch": 2, "paused": True}.items():
        watch.give(encode(record().model_copy(update={field: value})))
    await asyncio.sleep(0.05)
    assert len(step.reporter.published) == 1
    watch.give(encode(record().model_copy(update={"labels": {"role": "web"}})))
    assert await published(step, 2) == ["done", "done"]
    watch.give(WatchMark.RESET, 1, WatchMark.SYNCED)
    assert await published(step, 3) == ["done"] * 3


@pytest.mark.parametrize("on_bus", [1, b"of a newer controller"])
async def test_a_record_that_the_bus_has_only_older_or_unreadable_is_used_after_a_new_list(
    tasks: Background, on_bus: int | bytes
) -> None:
    watch, newer = Items(), record(1, epoch=2)
    work = worker(tasks, Step())
    tasks.start(work.follow(watch, "n1"))
    watch.give(WatchMark.RESET, on_bus, WatchMark.SYNCED)
    for _request in range(2):
        assert await work.newest(newer, 0.05) is None
    assert watch.relists == 1
    watch.give(WatchMark.RESET, on_bus)
    assert await work.newest(newer, 0.05) is None
    watch.give(WatchMark.SYNCED)
    assert await work.newest(newer, 5) == newer
    assert await work.newest(record(2, epoch=2), 0.05) is None  # that list says nothing of it
    assert watch.relists == 2


async def test_a_list_that_began_before_a_request_proves_nothing(tasks: Background) -> None:
    watch, newer = Items(), record(2)
    work = worker(tasks, Step())
    tasks.start(work.follow(watch, "n1"))
    watch.give(WatchMark.RESET, 1)
    assert await work.newest(newer, 0.05) is None
    assert watch.relists == 0
    watch.give(WatchMark.SYNCED)
    assert await work.newest(newer, 0.05) is None
    assert watch.relists == 1
    watch.give(WatchMark.RESET, WatchMark.SYNCED)
    assert await work.newest(newer, 0.05) is None  # the bus has no record of the VM
    assert watch.relists == 1
