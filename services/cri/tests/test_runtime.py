"""The runtime itself: version, conditions, and calls that no VM pod can have."""

import asyncio
import json
import os
import stat
from pathlib import Path

import grpc
import pytest
from cri_api.v1 import api_pb2
from services.cri.tests.world import Fleet, Kubelet, cri

from virtbus.cri.runtime_service import REFUSED
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.node import NodeState, ServiceState


async def test_kubelet_learns_the_version_and_the_cgroup_driver(kubelet: Kubelet) -> None:
    version = await kubelet.call("Version")
    assert (version.runtime_name, version.runtime_api_version) == ("virtbus", "v1")
    config = await kubelet.call("RuntimeConfig")
    assert config.linux.cgroup_driver == api_pb2.SYSTEMD
    await kubelet.call("UpdateRuntimeConfig")


async def test_the_conditions_tell_the_truth(tmp_path: Path, fleet: Fleet) -> None:
    broken = ServiceState(state=NodeState.RECOVERING, message="no bridge")
    fleet.node = fleet.node.model_copy(update={"services": {"netd": broken}})
    async with cri(tmp_path / "a", fleet) as kubelet:
        while True:
            conditions = (await kubelet.call("Status")).status.conditions
            found = {one.type: (one.status, one.message) for one in conditions}
            if found["RuntimeReady"][0]:
                break
        assert found["NetworkReady"] == (False, "no bridge")
    fleet.node = fleet.node.model_copy(update={"services": {}, "state": NodeState.DOWN})
    async with cri(tmp_path / "b", fleet) as kubelet:
        while True:
            conditions = (await kubelet.call("Status")).status.conditions
            found = {one.type: (one.status, one.message) for one in conditions}
            if found["NetworkReady"][0]:
                break
        assert (found["RuntimeReady"][0], "down" in found["RuntimeReady"][1]) == (False, True)


async def test_a_node_that_never_joined_is_not_ready(tmp_path: Path, fleet: Fleet) -> None:
    fleet.away = True
    async with cri(tmp_path, fleet) as kubelet:
        conditions = (await kubelet.call("Status")).status.conditions
        assert [one.status for one in conditions] == [False, False, False]


async def test_a_verbose_status_shows_the_settings(kubelet: Kubelet) -> None:
    info = (await kubelet.call("Status", verbose=True)).info
    assert json.loads(info["config"])["pod_network"] == "default"
    assert not (await kubelet.call("Status")).info


async def test_the_served_handlers_are_listed(kubelet: Kubelet) -> None:
    handlers = (await kubelet.call("Status")).runtime_handlers
    assert [one.name for one in handlers] == ["", "virtbus"]


@pytest.mark.parametrize("name", sorted(REFUSED))
async def test_a_call_that_no_vm_can_answer_is_refused_with_a_reason(
    kubelet: Kubelet, name: str
) -> None:
    code, text = await kubelet.refused(name)
    assert (code, text) == (grpc.StatusCode.UNIMPLEMENTED, REFUSED[name])


async def test_only_the_owner_may_connect(tmp_path: Path, kubelet: Kubelet) -> None:
    await kubelet.call("Version")
    mode = os.lstat(tmp_path / "run" / "cri.sock").st_mode
    assert (stat.S_ISSOCK(mode), stat.S_IMODE(mode)) == (True, 0o600)


async def test_one_process_works_in_a_state_folder(tmp_path: Path, fleet: Fleet) -> None:
    async with cri(tmp_path, fleet) as kubelet:
        with pytest.raises(VirtbusError, match="another virtbus-cri"):
            async with cri(tmp_path, fleet):
                pass
        await kubelet.call("Version")


async def test_a_file_that_is_no_socket_stays(tmp_path: Path, fleet: Fleet) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "cri.sock").write_text("mine")
    with pytest.raises(ExceptionGroup) as raised:
        async with asyncio.timeout(10), cri(tmp_path, fleet):
            pass
    assert raised.group_contains(VirtbusError, match="no socket")
    assert (tmp_path / "run" / "cri.sock").read_text() == "mine"


async def test_hostile_bytes_are_refused_and_end_nothing(tmp_path: Path, kubelet: Kubelet) -> None:
    async with grpc.aio.insecure_channel(f"unix:{tmp_path}/run/cri.sock") as channel:
        for path in ("/runtime.v1.RuntimeService/RunPodSandbox", "/runtime.v1.ImageService/No"):
            send: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(path)
            with pytest.raises(grpc.aio.AioRpcError):
                await send(b"\xff" * 1000, timeout=5)
    assert (await kubelet.call("Version")).runtime_name == "virtbus"
