"""Exec and ExecSync: the guest agent, and SSH with the pod's own key."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from grpc import StatusCode
from services.cri.tests.stream_clients import SpdyClient, websocket
from services.cri.tests.world import Fleet, Kubelet, cri

V4 = "v4.channel.k8s.io"


@pytest.fixture
async def kubelet(tmp_path: Path, fleet: Fleet) -> AsyncIterator[Kubelet]:
    """A CRI whose guests are reached on the loopback."""
    fleet.address = "127.0.0.1"
    async with fleet.guest.serving(), cri(tmp_path, fleet) as kubelet:
        yield kubelet


@pytest.fixture
async def container_id(fleet: Fleet, kubelet: Kubelet) -> str:
    """A running container whose guest took the keys of its seed."""
    _, container_id = await kubelet.running()
    (created,) = fleet.created
    seed = created["spec"]["volumes"][1]["cloud_init_no_cloud"]
    fleet.guest.keys = seed["ssh_keys"]
    assert seed["vendor_data"] == "#cloud-config\ndisable_root: false\n"
    return container_id


async def sync(kubelet: Kubelet, container_id: str, *words: str, timeout: int = 10) -> Any:
    """ExecSync."""
    request: dict[str, Any] = {"container_id": container_id, "cmd": words}
    return await kubelet.call("ExecSync", timeout=timeout, **request)


async def test_exec_sync_asks_the_guest_agent(kubelet: Kubelet, container_id: str) -> None:
    done = await sync(kubelet, container_id, "cat", "/tmp/ready")
    assert (done.exit_code, done.stdout, done.stderr) == (3, b"cat /tmp/ready", b"agent")


async def test_exec_sync_has_a_limit_of_its_own(kubelet: Kubelet, container_id: str) -> None:
    assert (await sync(kubelet, container_id, "true", timeout=0)).exit_code == 3
    for words in (["x"] * 257, ["x" * 65537]):
        code, _ = await kubelet.refused("ExecSync", container_id=container_id, cmd=words)
        assert code == StatusCode.INVALID_ARGUMENT


async def test_exec_sync_runs_one_command_at_a_time_for_each_vm(
    fleet: Fleet, kubelet: Kubelet, container_id: str
) -> None:
    async with asyncio.TaskGroup() as group:
        for _ in range(5):
            group.create_task(sync(kubelet, container_id, "sleep", "0.02"))
    assert fleet.agent.most_running == 1


async def test_exec_sync_uses_ssh_in_a_guest_without_an_agent(
    fleet: Fleet, kubelet: Kubelet, container_id: str
) -> None:
    fleet.agent.refuses = "guest_agent_absent"
    done = await sync(kubelet, container_id, "sh", "-c", 'echo "a  b"; echo no >&2; exit 4')
    assert (done.exit_code, done.stdout, done.stderr) == (4, b"a  b\n", b"no\n")
    flood = await sync(kubelet, container_id, "sh", "-c", "head -c 1000000 /dev/zero")
    assert (flood.exit_code, len(flood.stdout)) == (0, 256 * 1024)


async def test_exec_sync_ends_at_its_timeout(
    fleet: Fleet, kubelet: Kubelet, container_id: str
) -> None:
    fleet.agent.refuses = "guest_agent_absent"
    code, text = await kubelet.refused(
        "ExecSync", container_id=container_id, cmd=["sleep", "2"], timeout=1
    )
    assert (code, "within 1 s" in text) == (StatusCode.DEADLINE_EXCEEDED, True)


async def test_exec_sync_uses_ssh_while_the_bus_is_away(
    fleet: Fleet, kubelet: Kubelet, container_id: str
) -> None:
    """A probe is then as true as with the bus."""
    fleet.cut()
    while (await kubelet.call("Status")).status.conditions[2].status:
        await asyncio.sleep(0.01)
    done = await sync(kubelet, container_id, "sh", "-c", "echo here; exit 4")
    assert (done.exit_code, done.stdout) == (4, b"here\n")


async def test_no_probe_fails_because_the_bus_or_the_agent_is_away(
    tmp_path: Path, fleet: Fleet
) -> None:
    """kubelet takes DEADLINE_EXCEEDED for a failed probe, and another error for none."""
    async with cri(tmp_path, fleet) as kubelet:
        _, container_id = await kubelet.running()
        fleet.agent.hangs = True
        code, text = await kubelet.refused(
            "ExecSync", container_id=container_id, cmd=["true"], timeout=1
        )
        assert (code, "agent did not answer" in text) == (StatusCode.UNAVAILABLE, True)
        fleet.cut()
        while (await kubelet.call("Status")).status.conditions[2].status:
            await asyncio.sleep(0.01)
        code, text = await kubelet.refused("ExecSync", container_id=container_id, cmd=["true"])
        assert (code, "bus is away" in text) == (StatusCode.UNAVAILABLE, True)


async def test_a_command_waits_for_a_guest_that_boots(tmp_path: Path, fleet: Fleet) -> None:
    """Its SSH server begins to listen half a second after the call."""
    fleet.address = "127.0.0.1"
    fleet.agent.refuses = "guest_agent_absent"
    fleet.started_ns = time.time_ns()
    async with fleet.guest.serving():
        pass
    async with cri(tmp_path, fleet) as kubelet:
        _, container_id = await kubelet.running()
        (created,) = fleet.created
        fleet.guest.keys = created["spec"]["volumes"][1]["cloud_init_no_cloud"]["ssh_keys"]
        words = ("sh", "-c", "echo up")
        code, text = await kubelet.refused(
            "ExecSync", container_id=container_id, cmd=words, timeout=1
        )
        assert (code, "SSH server" in text) == (StatusCode.UNIMPLEMENTED, True)
        async with asyncio.TaskGroup() as group:
            asked = group.create_task(sync(kubelet, container_id, *words))
            want: dict[str, Any] = {
                "stdout": True,
                "container_id": container_id,
                "cmd": words,
            }
            streams = group.create_task(kubelet.call("Exec", **want))
            await asyncio.sleep(0.5)
            async with fleet.guest.serving():
                assert (await asked).stdout == b"up\n"
                assert (await streams).url


async def test_a_command_that_ends_at_its_timeout_ends_in_the_guest(
    fleet: Fleet, kubelet: Kubelet, container_id: str
) -> None:
    fleet.agent.refuses = "guest_agent_absent"
    await kubelet.refused("ExecSync", container_id=container_id, cmd=["sleep", "50"], timeout=1)
    async with asyncio.timeout(10):
        while fleet.guest.signals != ["KILL"]:
            await asyncio.sleep(0.02)


async def test_exec_has_streams_and_an_exit_code(kubelet: Kubelet, container_id: str) -> None:
    want = {"stdin": True, "stdout": True, "stderr": True}
    words = ["sh", "-c", "cat; echo done >&2; exit 5"]
    url = (await kubelet.call("Exec", container_id=container_id, cmd=words, **want)).url
    async with SpdyClient(url, V4) as client:
        error, stdin, stdout, stderr = (
            client.open(streamtype=name) for name in ("error", "stdin", "stdout", "stderr")
        )
        client.send(stdin, b"x" * 200_000, ends=True)
        status = await client.status(error)
        await client.until_ended(stdout, stderr)
        assert (client.got[stdout], client.got[stderr]) == (b"x" * 200_000, b"done\n")
        assert status["details"]["causes"] == [{"reason": "ExitCode", "message": "5"}]


async def test_exec_has_a_terminal_of_the_clients_size(
    fleet: Fleet, kubelet: Kubelet, container_id: str
) -> None:
    want = {"stdin": True, "stdout": True, "tty": True}
    url = (await kubelet.call("Exec", container_id=container_id, cmd=["size"], **want)).url
    async with websocket(url, "v5.channel.k8s.io") as socket:
        assert await socket.recv() == b"\x01"
        await socket.send(b"\x04not json")
        await socket.send(b'\x04{"Width":132,"Height":43}')
        assert await socket.recv() == b"\x01xterm"
        status = await socket.recv()
        assert isinstance(status, bytes)
        assert b'"Success"' in status
    assert fleet.guest.sizes == [(132, 43)]


async def test_a_client_that_leaves_ends_its_command(
    kubelet: Kubelet, container_id: str, tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    words = ["sh", "-c", f"cat; touch {mark}"]
    want = {"stdin": True, "stdout": True}
    url = (await kubelet.call("Exec", container_id=container_id, cmd=words, **want)).url
    async with SpdyClient(url, V4) as client:
        _, stdin, stdout = (client.open(streamtype=one) for one in ("error", "stdin", "stdout"))
        client.send(stdin, b"hello")
        await client.until(stdout, b"hello")
    async with asyncio.timeout(10):
        while not mark.exists():
            await asyncio.sleep(0.02)


async def test_a_guest_without_ssh_is_refused_with_the_reason(tmp_path: Path, fleet: Fleet) -> None:
    fleet.address = "127.0.0.1"
    fleet.agent.refuses = "guest_agent_absent"
    async with cri(tmp_path, fleet) as kubelet:
        _, container_id = await kubelet.running()
        for name, more in (("Exec", {"stdout": True}), ("ExecSync", {})):
            code, text = await kubelet.refused(
                name, container_id=container_id, cmd=["true"], **more
            )
            assert (code, "SSH server" in text) == (StatusCode.UNIMPLEMENTED, True), (name, text)


async def test_a_command_is_needed(kubelet: Kubelet, container_id: str) -> None:
    for name in ("Exec", "ExecSync"):
        code, _ = await kubelet.refused(name, container_id=container_id)
        assert code == StatusCode.INVALID_ARGUMENT


async def test_the_key_of_a_pod_is_in_no_answer(kubelet: Kubelet, container_id: str) -> None:
    answer = await kubelet.call("ContainerStatus", container_id=container_id, verbose=True)
    assert "virtbusVm" in answer.info["info"]
    assert "PRIVATE" not in answer.info["info"]
