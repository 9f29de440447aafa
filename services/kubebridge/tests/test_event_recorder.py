"""Events are limited in number and memory."""

import asyncio
from typing import Any

import pytest

from virtbus.bus.runtime.tasks import background
from virtbus.kubebridge.core.runtime.controller import RecordEvent
from virtbus.kubebridge.edge.cluster import StatusError
from virtbus.kubebridge.edge.runtime import event_recorder
from virtbus.kubebridge.edge.runtime.event_recorder import BURST, WAITING_MAX, EventRecorder


class Recorder:
    """The part of a cluster that the recorder uses."""

    def __init__(self) -> None:
        self.created: list[dict[str, Any]] = []
        self.patched = 0
        self.refuses = False
        self.forgets = False

    async def create(self, kind: object, body: dict[str, Any], namespace: str = "") -> None:
        await asyncio.sleep(0)
        if self.refuses:
            raise StatusError({"code": 403})
        self.created.append(body)

    async def patch(self, *_: object) -> None:
        if self.forgets:
            raise StatusError({"code": 404})
        self.patched += 1


def vmi(uid: str = "u") -> dict[str, Any]:
    meta = {"name": "web", "namespace": "default", "uid": uid}
    return {"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "metadata": meta}


async def sent(recorder: Recorder, *what: tuple[str, RecordEvent]) -> EventRecorder:
    sender = EventRecorder(recorder, "bridge-1")  # type: ignore[arg-type]
    async with background() as tasks:
        tasks.start(sender.run())
        for number, (uid, one) in enumerate(what):
            sender.record(vmi(uid), one)
            if number % 100 == 0:
                await asyncio.sleep(0.001)
        while sender._waiting.qsize():
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
    return sender


async def test_an_event_has_its_object_and_reason() -> None:
    recorder = Recorder()
    await sent(recorder, ("u", RecordEvent("Started", "VirtualMachineInstance started.")))
    (event,) = recorder.created
    assert event["regarding"]["uid"] == "u"
    assert (event["reason"], event["type"]) == ("Started", "Normal")
    assert event["metadata"]["namespace"] == "default"


async def test_a_repeated_event_is_counted_and_not_written() -> None:
    recorder = Recorder()
    await sent(recorder, *[("u", RecordEvent("SyncFailed", "no", warning=True))] * 500)
    assert (len(recorder.created), recorder.patched) == (1, 0)


async def test_a_repeat_of_an_expired_event_is_written_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(event_recorder, "COUNTED_S", 0.0)
    recorder = Recorder()
    recorder.forgets = True
    started = ("u", RecordEvent("SuccessfulCreate", "Started the virtual machine"))
    sender = await sent(recorder, started, started)
    first, second = (event["metadata"]["name"] for event in recorder.created)
    assert first != second
    assert sender.dropped == 0


async def test_a_note_has_a_bounded_size() -> None:
    recorder = Recorder()
    await sent(recorder, ("u", RecordEvent("SyncFailed", "é" * 2000, warning=True)))
    (event,) = recorder.created
    assert event["note"] == "é" * 512


async def test_events_of_one_object_are_limited() -> None:
    recorder = Recorder()
    sender = await sent(
        recorder, *[("u", RecordEvent("Odd", f"number {n}")) for n in range(10_000)]
    )
    assert len(recorder.created) <= BURST + 1
    assert sender.dropped >= 10_000 - BURST - 1


async def test_events_beyond_the_queue_are_dropped() -> None:
    sender = EventRecorder(Recorder(), "bridge-1")  # type: ignore[arg-type]
    for number in range(10_000):
        sender.record(vmi(str(number)), RecordEvent("Started", "it runs"))
    assert sender._waiting.qsize() == WAITING_MAX
    assert sender.dropped == 10_000 - WAITING_MAX


async def test_a_refused_event_has_no_effect() -> None:
    recorder = Recorder()
    recorder.refuses = True
    sender = await sent(
        recorder, ("u", RecordEvent("Started", "a")), ("v", RecordEvent("Started", "b"))
    )
    assert sender.dropped == 2


async def test_an_event_that_was_refused_is_sent_again_when_it_repeats() -> None:
    recorder = Recorder()
    sender = EventRecorder(recorder, "bridge-1")  # type: ignore[arg-type]
    async with background() as tasks:
        tasks.start(sender.run())
        for refuses in (True, False):
            recorder.refuses = refuses
            sender.record(vmi(), RecordEvent("Started", "a"))
            await asyncio.sleep(0.01)
    assert len(recorder.created) == 1
