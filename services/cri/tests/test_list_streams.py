"""The lists of Kubernetes 1.36 come in parts, and have what the older lists have."""

from typing import Any

import grpc
import pytest
from cri_api.v1 import api_pb2
from services.cri.tests.world import Fleet, Kubelet

from virtbus.cri.edge import grpc_server
from virtbus.cri.edge.grpc_server import LISTS_AS_STREAMS

SERVICES = api_pb2.DESCRIPTOR.services_by_name.values()
LISTS = {method.name: method for service in SERVICES for method in service.methods}


@pytest.fixture
async def channel(fleet: Fleet, kubelet: Kubelet, tmp_path: Any) -> Any:
    """A connection whose messages are bytes."""
    await kubelet.call("Version")
    async with grpc.aio.insecure_channel(f"unix:{tmp_path}/run/cri.sock") as channel:
        yield channel


async def parts(channel: grpc.aio.Channel, name: str, body: bytes = b"") -> list[bytes]:
    """Return the messages of a stream."""
    service = LISTS[LISTS_AS_STREAMS[name]].containing_service.full_name
    send: Any = channel.unary_stream(f"/{service}/{name}")
    return [one async for one in send(body, timeout=10)]


@pytest.mark.parametrize("name", LISTS_AS_STREAMS)
async def test_a_stream_has_the_elements_of_its_list_in_the_first_field(
    kubelet: Kubelet, channel: grpc.aio.Channel, name: str
) -> None:
    """Field 1 is repeated in the answers of Kubernetes 1.36, as in the lists of 1.34."""
    await kubelet.running()
    listed = await kubelet.call(LISTS_AS_STREAMS[name])
    ((field, elements),) = listed.ListFields()
    assert (field.number, field.is_repeated, len(elements)) == (1, True, 1)
    (part,) = await parts(channel, name)
    told = type(listed).FromString(part)
    for one in (listed, told):
        _without_times(one)
    assert told == listed


def _without_times(message: Any) -> None:
    for field, value in message.ListFields():
        if field.name == "timestamp":
            message.ClearField(field.name)
        elif field.message_type is not None and field.message_type.GetOptions().map_entry:
            continue
        elif field.message_type is not None:
            for inner in value if field.is_repeated else (value,):
                _without_times(inner)


async def test_a_long_list_has_several_parts_and_an_empty_one_has_none(
    kubelet: Kubelet, channel: grpc.aio.Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_server, "PART_ENTRIES", 2)
    assert await parts(channel, "StreamPodSandboxes") == []
    made = [
        await kubelet.sandbox(metadata={"name": f"p{at}", "uid": str(at), "namespace": "default"})
        for at in range(5)
    ]
    told = [
        [one.id for one in api_pb2.ListPodSandboxResponse.FromString(part).items]
        for part in await parts(channel, "StreamPodSandboxes")
    ]
    assert [len(ids) for ids in told] == [2, 2, 1]
    assert [one for ids in told for one in ids] == made
    chosen = api_pb2.PodSandboxFilter(id=made[3])
    wanted = api_pb2.ListPodSandboxRequest(filter=chosen).SerializeToString()
    (part,) = await parts(channel, "StreamPodSandboxes", wanted)
    (one,) = api_pb2.ListPodSandboxResponse.FromString(part).items
    assert one.id == made[3]


async def test_a_request_that_is_no_message_is_refused(channel: grpc.aio.Channel) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await parts(channel, "StreamContainers", b"\xff" * 50)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_call_of_a_later_version_is_unimplemented(channel: grpc.aio.Channel) -> None:
    send: Any = channel.unary_unary("/runtime.v1.RuntimeService/NobodyKnowsThis")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await send(b"", timeout=10)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
