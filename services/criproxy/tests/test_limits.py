"""Deadlines, cancellation, hostile bytes and sizes."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from cri_api.v1 import api_pb2
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from services.criproxy.tests.world import MIB, Node, sandbox, until

from virtbus.criproxy.core import calls
from virtbus.criproxy.core.entries import framed
from virtbus.criproxy.edge import messages
from virtbus.criproxy.service import CriProxy
from virtbus.schemas.errors import VirtbusError

READ = (*calls.BY_ID, calls.RUN, calls.PULL, calls.IMAGE_STATUS, calls.REMOVE_IMAGE, *calls.LISTS)
"""Calls whose request the proxy reads."""


async def test_the_deadline_of_a_client_reaches_the_runtime(node: Node) -> None:
    _, container = await node.pod("web", vm=True)
    await node.call("StopContainer", timeout_s=33, container_id=container)
    left_s = node.vms.deadlines["StopContainer"]
    assert left_s is not None
    assert 30 < left_s < 34


async def test_a_deadline_that_passes_is_the_clients_error_and_ends_the_runtimes_call(
    node: Node,
) -> None:
    _, container = await node.pod("web", vm=True)
    node.vms.hangs.add("ExecSync")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await node.call("ExecSync", timeout_s=0.3, container_id=container)
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: node.vms.cancelled == ["ExecSync"], "the runtime's call ended")


async def test_a_cancelled_call_is_cancelled_in_the_runtime(node: Node) -> None:
    _, container = await node.pod("web", vm=True)
    node.vms.hangs |= {"ExecSync", "RunPodSandbox", "ListContainers"}
    asked: tuple[tuple[str, dict[str, Any]], ...] = (
        ("ExecSync", {"container_id": container}),
        ("RunPodSandbox", {"config": sandbox("x"), "runtime_handler": "virtbus"}),
        ("ListContainers", {}),
    )
    for name, fields in asked:
        before = node.vms.count(name)
        task: asyncio.Task[Any] = asyncio.Task(node.call(name, **fields))
        while node.vms.count(name) == before:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while name not in node.vms.cancelled:
            await asyncio.sleep(0.01)
    node.vms.hangs.clear()
    assert await node.listed() == {container}


async def test_the_error_of_a_runtime_reaches_the_client_unchanged(node: Node) -> None:
    _, container = await node.pod("web", vm=True)
    node.vms.errors["StartContainer"] = (grpc.StatusCode.FAILED_PRECONDITION, "no memory: ünits")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await node.call("StartContainer", container_id=container)
    assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert caught.value.details() == "no memory: ünits"
    assert dict(caught.value.trailing_metadata() or ())["runtime-detail"] == "virtbus"


async def test_metadata_of_a_client_reaches_the_runtime_but_for_grpcs_own(node: Node) -> None:
    path = calls.PATHS["Version"]
    version: Any = node.channel.unary_unary(path)
    sent = {"traceparent": "00-1-2-01", "tenant": "blue", "virtbus-case": "7"}
    await version(b"", metadata=(*sent.items(), ("user-agent", "theirs")))
    got = node.containers.metadata
    assert {key: got.get(key) for key in sent} == sent
    assert "theirs" not in str(got["user-agent"])


@pytest.mark.parametrize("name", READ)
async def test_a_request_that_is_no_message_is_refused_before_a_runtime_sees_it(
    node: Node, name: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await node.raw(name, b"\xff\xff\xff\xff")
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert f"no {name}Request" in str(caught.value.details())
    assert not node.containers.asked
    assert not node.vms.asked


async def test_a_call_without_its_id_is_refused(node: Node) -> None:
    code, text = await node.refused("StopContainer")
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert "container_id is empty" in text


async def test_a_message_above_the_limit_is_refused_and_the_next_call_works(node: Node) -> None:
    huge = sandbox("web", annotations={"a": "x" * 17 * MIB})
    code, _ = await node.refused("RunPodSandbox", config=huge)
    assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
    node.containers.answers["ExecSync"] = lambda _: api_pb2.ExecSyncResponse(stdout=b"x" * 17 * MIB)
    code, _ = await node.refused("ExecSync", container_id="none")
    assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (await node.call("Version")).runtime_name == "containerd"


async def test_a_list_above_the_limit_is_the_last_list(node: Node) -> None:
    _, container = await node.pod("web", vm=True)
    await node.settled()
    node.vms.raw["ListContainers"] = framed(b"x" * 17 * MIB)
    assert await node.listed() == {container}


async def test_an_unreadable_list_is_passed_on_but_never_kept(node: Node) -> None:
    _, container = await node.pod("web", vm=True)
    await node.settled()
    node.vms.raw["ListContainers"] = b"\xff\xff"
    assert (await node.raw("ListContainers", b"")).endswith(b"\xff\xff")
    await node.proxy.memory.kept()
    await node.vms.stop()
    assert await node.listed() == {container}


async def test_half_open_calls_of_one_client_do_not_stop_another(node: Node) -> None:
    """Each begins a request and sends no message."""
    path = calls.PATHS["ListContainers"]
    async with grpc.aio.insecure_channel(f"unix:{node.settings.socket}") as stranger:
        half_open: Any = stranger.stream_unary(path)
        opened = [half_open() for _ in range(400)]
        await asyncio.sleep(0.2)
        async with asyncio.timeout(10):
            await node.listed()
        for one in opened:
            one.cancel()


async def test_the_socket_is_only_its_owners_and_one_proxy_works_in_a_folder(node: Node) -> None:
    assert node.settings.socket.stat().st_mode & 0o777 == 0o600
    with pytest.raises(VirtbusError) as caught:
        await CriProxy(node.settings).run()
    assert caught.value.reason == "criproxy_running"


async def test_a_path_that_is_no_socket_is_refused(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.settings.socket.write_text("mine")
    with pytest.raises(ExceptionGroup) as caught:
        await CriProxy(node.settings).run()
    assert "is no socket; remove it" in str(caught.value.exceptions[0])
    assert node.settings.socket.read_text() == "mine"


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=st.binary(max_size=300), name=st.sampled_from(sorted(calls.LISTS)))
def test_any_bytes_are_a_list_or_unreadable(body: bytes, name: str) -> None:
    try:
        entries = messages.entries(name, body)
    except messages.UnreadableError:
        return
    for entry in entries.values():
        assert messages.stored(name, entry.raw) == entry


@given(size=st.integers(0, 300_000))
def test_a_frame_is_what_protobuf_writes(size: int) -> None:
    image = api_pb2.Image(id="x" * size)
    told = api_pb2.ListImagesResponse(images=[image]).SerializeToString()
    assert framed(image.SerializeToString()) == told
