"""A mount that hangs delays the calls of its own pod only."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from services.cri.tests.world import Fleet, Kubelet

from virtbus.cri.core.configs import ContainerConfig
from virtbus.cri.edge import volume_files
from virtbus.cri.edge.volume_reads import VolumeReads
from virtbus.schemas.errors import VirtbusError


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Reads of mounts wait for this event, as for the server of a mount."""
    answers = threading.Event()

    def inspected(config: ContainerConfig, _namespace: str, _offered: object) -> ContainerConfig:
        answers.wait(20)
        return config

    monkeypatch.setattr(volume_files, "inspected", inspected)
    yield answers
    answers.set()


async def test_other_calls_are_answered_while_a_mount_hangs(
    answers: threading.Event, fleet: Fleet, kubelet: Kubelet
) -> None:
    creating = asyncio.Task(kubelet.container(await kubelet.sandbox()))
    while not any(one.name == "volumes" for one in threading.enumerate()):
        await asyncio.sleep(0.01)
    assert (await kubelet.call("Version", timeout_s=2)).runtime_name
    assert len((await kubelet.call("ListPodSandbox", timeout_s=2)).items) == 1
    assert not creating.done()
    answers.set()
    assert await creating
    assert len(fleet.vms) == 1


async def test_a_pod_has_one_read_and_gets_an_error_after_the_limit(
    answers: threading.Event,
) -> None:
    reads, config = VolumeReads(limit_s=0.05), ContainerConfig()
    for why in ("takes more than", "has not returned"):
        with pytest.raises(VirtbusError, match=why) as refused:
            await reads.inspected("a", "default", config)
        assert refused.value.reason == "volume_stuck"
    answers.set()
    assert await reads.inspected("b", "default", config) == config
    async with asyncio.timeout(5):
        while True:
            try:
                assert await reads.inspected("a", "default", config) == config
                break
            except VirtbusError:
                await asyncio.sleep(0.01)


async def test_the_error_of_a_read_reaches_its_caller(tmp_path: Path) -> None:
    config = ContainerConfig.model_validate(
        {"mounts": [{"container_path": "/a", "host_path": str(tmp_path / "gone"), "is_file": True}]}
    )
    with pytest.raises(VirtbusError) as refused:
        await VolumeReads().files("a", config)
    assert refused.value.reason == "volume_unreadable"
