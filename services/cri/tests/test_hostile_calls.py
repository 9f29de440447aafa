"""Requests of a hostile or confused client: each gets a status, and nothing is left behind."""

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from cri_api.v1 import api_pb2
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from services.cri.tests.world import Fleet, Kubelet, container, sandbox

SERVICES = api_pb2.DESCRIPTOR.services_by_name.values()
METHODS = {one.name: one for service in SERVICES for one in service.methods}
SINGLE = sorted(name for name, one in METHODS.items() if not one.server_streaming)
TEXTS = (
    "",
    "a",
    "x" * 70_000,
    "../../etc",
    "/dev/sda",
    "web\x00",
    "ü" * 300,
    "virtlet.cloud/",
    "-1",
)
NUMBERS = (0, 1, -1, 2**31 - 1, 2**63 - 1, -(2**63))
DEPTH = 6
REFUSALS = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNIMPLEMENTED,
}


def path(method: MethodDescriptor) -> str:
    """Return the path of a call."""
    return f"/{method.containing_service.full_name}/{method.name}"


@pytest.fixture
async def channel(tmp_path: Path, kubelet: Kubelet) -> Any:
    """A connection whose messages are bytes."""
    await kubelet.call("Version")
    async with grpc.aio.insecure_channel(f"unix:{tmp_path}/run/cri.sock") as channel:
        yield channel


async def code(channel: grpc.aio.Channel, name: str, body: bytes) -> grpc.StatusCode:
    """Return the status of a call."""
    send: Any = channel.unary_unary(path(METHODS[name]))
    try:
        await send(body, timeout=10)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


@pytest.mark.parametrize("name", SINGLE)
async def test_bytes_that_are_no_message_are_an_invalid_argument(
    channel: grpc.aio.Channel, name: str
) -> None:
    told = await code(channel, name, b"\xff" * 100)
    assert told in {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED}


@pytest.mark.parametrize("seed", range(8))
async def test_any_message_is_answered_or_refused_and_leaves_nothing(
    fleet: Fleet, kubelet: Kubelet, channel: grpc.aio.Channel, seed: int
) -> None:
    draw = random.Random(seed)
    sandbox_id, container_id = await kubelet.running()
    ids = (sandbox_id, container_id)
    for _ in range(60):
        name = draw.choice(SINGLE)
        request: Any = getattr(api_pb2, METHODS[name].input_type.name)()
        _fill(request, draw, ids, DEPTH)
        told = await code(channel, name, request.SerializeToString())
        assert told in REFUSALS | {grpc.StatusCode.OK}, (name, told, str(request)[:2000])
    await _removed(fleet, kubelet)


def _fill(message: Message, draw: random.Random, ids: tuple[str, ...], depth: int) -> None:
    """Set some fields of a message to values that somebody might not expect."""
    for field in message.DESCRIPTOR.fields:
        if draw.random() < 0.4:
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            _fill_map(getattr(message, field.name), field, draw)
        elif field.message_type is not None:
            for part in _parts(message, field, draw):
                if depth:
                    _fill(part, draw, ids, depth - 1)
        elif field.is_repeated:
            getattr(message, field.name).extend(_value(field, draw, ids) for _ in range(3))
        else:
            setattr(message, field.name, _value(field, draw, ids))


def _parts(message: Message, field: Any, draw: random.Random) -> Iterator[Message]:
    inner = getattr(message, field.name)
    if not field.is_repeated:
        inner.SetInParent()
        yield inner
        return
    for _ in range(draw.choice((1, 3))):
        yield inner.add()


def _fill_map(found: Any, field: Any, draw: random.Random) -> None:
    value = field.message_type.fields_by_name["value"]
    if value.message_type is None:
        for _ in range(3):
            found[draw.choice(TEXTS)] = _value(value, draw, ())


def _value(field: Any, draw: random.Random, ids: tuple[str, ...]) -> Any:
    if field.type == FieldDescriptor.TYPE_STRING:
        known = [one for one in ids if field.name.endswith("_id")]
        return draw.choice((*known, *TEXTS))
    if field.type == FieldDescriptor.TYPE_BYTES:
        return draw.randbytes(100)
    if field.type == FieldDescriptor.TYPE_BOOL:
        return draw.random() < 0.5
    if field.type in {FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT}:
        return draw.choice((0.0, -1e300, float("inf"), float("nan")))
    if field.enum_type is not None:
        return draw.choice((0, 1, 2, 99))
    bits = 32 if "32" in str(field.cpp_type) or field.type in _NARROW else 64
    low, high = (0, 2**bits) if field.type in _UNSIGNED else (-(2 ** (bits - 1)), 2 ** (bits - 1))
    return draw.choice([one for one in NUMBERS if low <= one < high])


_NARROW = {FieldDescriptor.TYPE_INT32, FieldDescriptor.TYPE_UINT32}
_UNSIGNED = {FieldDescriptor.TYPE_UINT32, FieldDescriptor.TYPE_UINT64}


async def _removed(fleet: Fleet, kubelet: Kubelet) -> None:
    """Remove all pods, as kubelet does, and wait until no VM is left."""
    for one in (await kubelet.call("ListPodSandbox")).items:
        await kubelet.call("StopPodSandbox", pod_sandbox_id=one.id)
        await kubelet.call("RemovePodSandbox", pod_sandbox_id=one.id)
    assert not (await kubelet.call("ListContainers")).containers
    async with asyncio.timeout(10):
        while fleet.vms:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("seed", range(12))
async def test_calls_that_are_repeated_and_out_of_order_leave_one_vm_or_none(
    fleet: Fleet, kubelet: Kubelet, seed: int
) -> None:
    """Each call is sent twice at once. A pod never has two VMs that are on."""
    draw = random.Random(seed)
    await kubelet.call("PullImage", image={"image": "tiny"})
    ids: dict[str, list[str]] = {"pod_sandbox_id": ["none"], "container_id": ["none"]}
    for _ in range(40):
        name, request, answer = _drawn(draw, ids)
        async with asyncio.TaskGroup() as group:
            twice = [group.create_task(_told(kubelet, name, request)) for _ in range(2)]
        told = {found for one in twice if (found := getattr(one.result(), answer, ""))}
        assert len(told) <= 1, (name, told)
        ids.get(answer, []).extend(told)
        assert sum(vm.powered for vm in fleet.vms.values()) <= 1
    await _removed(fleet, kubelet)


def _drawn(draw: random.Random, ids: dict[str, list[str]]) -> tuple[str, dict[str, Any], str]:
    """Return a call, its request, and the name of the id in its answer."""
    attempt = draw.randrange(3)
    a_sandbox = {"pod_sandbox_id": draw.choice(ids["pod_sandbox_id"][-3:])}
    a_container = {"container_id": draw.choice(ids["container_id"][-3:])}
    config = container(attempt, image={"image": "tiny"})
    return draw.choice(
        (
            ("RunPodSandbox", {"config": sandbox(attempt)}, "pod_sandbox_id"),
            ("CreateContainer", {**a_sandbox, "config": config}, "container_id"),
            ("CreateContainer", {**a_sandbox, "config": config}, "container_id"),
            ("StartContainer", a_container, ""),
            ("StartContainer", a_container, ""),
            ("StopContainer", {**a_container, "timeout": 1}, ""),
            ("RemoveContainer", a_container, ""),
            ("StopPodSandbox", a_sandbox, ""),
            ("RemovePodSandbox", a_sandbox, ""),
        )
    )


async def _told(kubelet: Kubelet, name: str, request: dict[str, Any]) -> Any:
    """Return the answer of a call; None for a refusal that kubelet understands."""
    try:
        return await kubelet.call(name, **request)
    except grpc.aio.AioRpcError as error:
        if error.code() not in REFUSALS:
            raise
    return None


async def test_half_open_calls_of_one_client_do_not_stop_another(
    tmp_path: Path, kubelet: Kubelet
) -> None:
    """Each begins a request and sends no message."""
    await kubelet.call("Version")
    async with grpc.aio.insecure_channel(f"unix:{tmp_path}/run/cri.sock") as stranger:
        half_open: Any = stranger.stream_unary("/runtime.v1.RuntimeService/ListContainers")
        opened = [half_open() for _ in range(400)]
        await asyncio.sleep(0.2)
        async with asyncio.timeout(10):
            await kubelet.call("ListContainers")
        for one in opened:
            one.cancel()
