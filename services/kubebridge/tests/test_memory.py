"""One tenant's annotations have a bounded cost for others (M10)."""

import asyncio
import json
import tracemalloc
from collections.abc import Mapping
from typing import Any

import pytest
from services.kubebridge.tests.manifests import find, put, vm
from services.kubebridge.tests.world import NOW, reconcile_vm, vmi_of

from virtbus.bus.client.memory_bus import MemoryBus, MemoryServer
from virtbus.bus.client.ports import Endpoint, Request, ServiceInfo
from virtbus.kubebridge.core.fields.vm import IGNITION
from virtbus.kubebridge.core.runtime.controller import Patch, RecordEvent
from virtbus.kubebridge.core.translation import annotations as notes
from virtbus.kubebridge.core.translation.mapping import vm_field_causes
from virtbus.kubebridge.edge.cluster import PAGE
from virtbus.kubebridge.edge.runtime.store import ENDED_MAX, ObjectStore
from virtbus.kubebridge.edge.runtime.vm_informer import VmInformer
from virtbus.schemas.subjects import api

OBJECT_BYTES = 1536 * 1024
"""Largest object that etcd stores."""
MEMORY_LIMIT_BYTES = 512 * 1024 * 1024


def stopped(number: int, annotations: Mapping[str, Any], template: Mapping[str, Any]) -> Any:
    named = {"metadata.name": f"vm-{number}", "metadata.uid": str(number)}
    return put(
        vm(),
        named
        | {
            "metadata.annotations": dict(annotations),
            "spec.template.metadata.annotations": dict(template),
            "spec.runStrategy": "Halted",
        },
    )


def test_vms_with_huge_annotations_take_little_memory() -> None:
    objects = ObjectStore()
    tracemalloc.start()
    for number in range(200):
        large = {f"note-{number}-{index}": "x" * 4000 for index in range(64)}
        crowd = {f"crowd-{number}-{index}": "x" * 4000 for index in range(300)}
        obj = stopped(number, large, crowd)
        assert len(json.dumps(obj)) > 1_400_000
        objects.put(obj)
        del obj, large, crowd
    held_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(tuple(objects)) == 200
    assert held_bytes / 200 < 20_000, f"{held_bytes / 200:.0f} bytes an object"
    assert 2000 * held_bytes / 200 < MEMORY_LIMIT_BYTES / 8


def test_a_page_of_the_largest_objects_fits_into_memory_three_times() -> None:
    """The three copies are bytes, text and parsed objects."""
    assert 3 * PAGE * OBJECT_BYTES < MEMORY_LIMIT_BYTES / 2


def test_annotations_that_rules_read_are_kept() -> None:
    generation = "kubevirt.io/vm-generation"
    objects = ObjectStore()
    objects.put(stopped(1, {generation: "7", "a": "b", "x": "y" * 9999}, {"mine": "stays"}))
    kept = objects.get("default/vm-1")
    assert kept is not None
    assert kept["metadata"]["annotations"] == {generation: "7"}
    assert kept["spec"]["template"]["metadata"]["annotations"] == {"mine": "stays"}


def test_ignition_is_kept_whole_up_to_its_bound() -> None:
    for given, kept in ((notes.IGNITION_CHARS, 0), (notes.IGNITION_CHARS + 9999, 1)):
        read = notes.read({IGNITION: "x" * given})
        assert len(read[IGNITION]) == notes.IGNITION_CHARS + kept


def test_too_many_annotations_are_refused_with_their_size() -> None:
    causes = vm_field_causes(stopped(1, {}, {"big": "x" * notes.TEMPLATE_BYTES}))
    assert [(one.field, one.message) for one in causes] == [
        (
            "spec.template.metadata.annotations",
            "the annotations have 16387 bytes, but a VMI gets at most 16384",
        )
    ]
    assert vm_field_causes(stopped(1, {"big": "x" * 200_000}, {"small": "x" * 9000})) == []


@pytest.mark.parametrize("strategy", ["Always", "Halted"])
def test_dropped_annotations_are_reported_on_the_vm(strategy: str) -> None:
    """This includes a VM in the cache, which lacks most of the annotations."""
    objects = ObjectStore()
    large = stopped(1, {}, {"mine": "stays", "big": "x" * 200_000})
    objects.put(put(large, {"spec.runStrategy": strategy}))
    kept = objects.get("default/vm-1")
    assert kept is not None
    instance = vmi_of(kept, paused=False) if strategy == "Always" else None
    actions = reconcile_vm(kept, instance, NOW)
    (status,) = (one.changes["status"] for one in actions if isinstance(one, Patch) and one.sub)
    said = find(status["conditions"], "AnnotationsDropped")
    message = (
        "spec.template.metadata.annotations: the annotations have 200012 bytes, but a VMI gets at"
        " most 16384"
    )
    assert (said["status"], said["reason"], said["message"]) == (
        *("True", "AnnotationsTooLarge", message),
    )
    assert RecordEvent("AnnotationsTooLarge", message, warning=True) in actions
    again = reconcile_vm(kept | {"status": status}, instance, NOW)
    assert not [one for one in again if isinstance(one, RecordEvent)], "one Event, not one a look"
    small = stopped(1, {}, {"mine": "stays"}) | {"status": status}
    again = reconcile_vm(small, None, NOW)
    (mended,) = (one.changes["status"] for one in again if isinstance(one, Patch) and one.sub)
    assert not find(mended["conditions"], "AnnotationsDropped")


def test_a_bounded_number_of_ends_is_remembered() -> None:
    views = VmInformer(MemoryBus(MemoryServer()), "c")
    for number in range(ENDED_MAX + 1):
        views.ended(str(number))
    assert not views.gone("0")
    assert views.gone(str(ENDED_MAX))


async def test_an_invalid_reply_only_restarts_the_watch() -> None:
    server = MemoryServer()
    bus, controller = MemoryBus(server, "bridge"), MemoryBus(server, "controller")
    hostile: list[Any] = [[1], "text", 5, {"items": [{}]}, {"items": 7}, {"change": [1]}]

    async def watch(request: Request) -> None:
        if hostile:
            await request.stream(hostile.pop(0))
        await request.stream({"synced": True})

    views = VmInformer(bus, "c")
    views._pauses = iter(lambda: 0.0, 1.0)
    info, subject = ServiceInfo("controller", "1"), api("vm", "watch")
    async with (
        asyncio.timeout(15),
        controller.serve(info, [Endpoint("w", subject, watch)]),
        asyncio.TaskGroup() as group,
    ):
        running = group.create_task(views.run())
        while hostile:
            await asyncio.sleep(0.01)
        await views.synced.wait()
        assert not running.done()
        running.cancel()
