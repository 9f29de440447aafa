"""Events: each change of a pod once, in order, and no client delays another."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from cri_api.v1 import api_pb2
from services.cri.tests.world import Fleet, Kubelet

from virtbus.bus.runtime.sources import REAL
from virtbus.cri.core.answers import Plain
from virtbus.cri.core.configs import SandboxConfig
from virtbus.cri.core.pod import Pod, Sandbox
from virtbus.cri.event_streams import CLIENTS, QUEUED, EventStreams
from virtbus.schemas.errors import VirtbusError


async def test_a_pods_life_is_told_in_order(fleet: Fleet, kubelet: Kubelet) -> None:
    seen: list[Any] = []

    async def follow() -> None:
        async for event in kubelet.events():
            seen.append(event)  # noqa: PERF401  the test reads the list meanwhile

    async with asyncio.TaskGroup() as group:
        task = group.create_task(follow())
        while not seen:  # the stream shows only events after its call
            first = await kubelet.sandbox(metadata={"name": "x", "uid": "1", "namespace": "a"})
            await kubelet.call("RemovePodSandbox", pod_sandbox_id=first)
            await asyncio.sleep(0.01)
        sandbox_id, container_id = await kubelet.running()
        fleet.end("panicked")
        await kubelet.until_state(container_id, api_pb2.CONTAINER_EXITED)
        await kubelet.call("StopPodSandbox", pod_sandbox_id=sandbox_id)
        await kubelet.call("RemovePodSandbox", pod_sandbox_id=sandbox_id)
        mine = {sandbox_id: "sandbox", container_id: "container"}
        while sum(one.container_id in mine for one in seen) < 8:
            await asyncio.sleep(0.01)
        task.cancel()
    kind = api_pb2.ContainerEventType.Name
    lives = [
        (mine[one.container_id], kind(one.container_event_type).split("_")[1])
        for one in seen
        if one.container_id in mine
    ]
    assert lives == [
        ("sandbox", "CREATED"),
        ("sandbox", "STARTED"),
        ("container", "CREATED"),
        ("container", "STARTED"),
        ("container", "STOPPED"),
        ("sandbox", "STOPPED"),
        ("container", "DELETED"),
        ("sandbox", "DELETED"),
    ]
    stopped = api_pb2.CONTAINER_STOPPED_EVENT
    (end,) = (
        one
        for one in seen
        if (one.container_id, one.container_event_type) == (container_id, stopped)
    )
    assert end.pod_sandbox_status.metadata.name == "web"
    assert end.containers_statuses[0].reason == "GuestPanicked"


async def first(stream: AsyncIterator[Plain]) -> Plain:
    """Return the next event of a stream."""
    return await anext(stream)


def _pod(count: int) -> Pod:
    made = (Sandbox(id=str(n), config=SandboxConfig(), created_ns=1) for n in range(count))
    return Pod(key="k", sandboxes=tuple(made))


async def test_a_client_that_does_not_read_loses_its_stream_only() -> None:
    streams = EventStreams(REAL)
    slow, quick = streams.stream(), streams.stream()
    async with asyncio.TaskGroup() as group:
        waits = [group.create_task(first(one)) for one in (slow, quick)]
        await asyncio.sleep(0)
        streams.changed(None, _pod(1))
    assert [wait.result()["container_id"] for wait in waits] == ["0", "0"]
    await anext(quick)
    for _ in range(QUEUED // 2):
        streams.changed(None, _pod(1))
        await anext(quick)
        await anext(quick)
    with pytest.raises(VirtbusError, match="list the pods"):
        async for _ in slow:
            pass


async def test_the_number_of_streams_is_bounded() -> None:
    streams = EventStreams(REAL)
    opened = [streams.stream() for _ in range(CLIENTS)]
    async with asyncio.TaskGroup() as group:
        waits = [group.create_task(first(one)) for one in opened]
        await asyncio.sleep(0)
        with pytest.raises(VirtbusError, match="clients read events"):
            await anext(streams.stream())
        for wait in waits:
            wait.cancel()
