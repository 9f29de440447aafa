"""Work that no call waits for: duties of pods, and news of their VMs."""

import asyncio
from pathlib import Path

import pytest
from cri_api.v1 import api_pb2
from services.cri.tests.world import Fleet, Kubelet, cri


async def test_a_delete_that_is_refused_delays_no_other_pod(fleet: Fleet, kubelet: Kubelet) -> None:
    first, _ = await kubelet.running()
    uid = fleet.vm.uid
    second = await kubelet.sandbox(
        metadata={"name": "db", "uid": "77", "namespace": "default", "attempt": 0}
    )
    fleet.protected.add(uid)
    for one in (first, second):
        await kubelet.call("StopPodSandbox", pod_sandbox_id=one)
        await kubelet.call("RemovePodSandbox", pod_sandbox_id=one)
    while set(fleet.vms) != {uid}:
        await asyncio.sleep(0.01)
    fleet.protected.clear()
    while fleet.vms:
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("restart", [False, True], ids=["at once", "after a restart"])
async def test_the_end_of_a_guest_is_seen_on_a_restored_bus(
    tmp_path: Path, fleet: Fleet, *, restart: bool
) -> None:
    """The revisions of a restored bus start lower than those that virtbus-cri has stored."""
    async with cri(tmp_path, fleet) as kubelet:
        _, container_id = await kubelet.running()
        assert fleet.vm.revision > 1
        if not restart:
            fleet.show(fleet.vm.uid, revision=1)
            fleet.end("panicked")
            await kubelet.until_state(container_id, api_pb2.CONTAINER_EXITED)
    fleet.show(fleet.vm.uid, revision=1)
    if restart:
        fleet.end("panicked")
    async with cri(tmp_path, fleet) as kubelet:
        status = await kubelet.until_state(container_id, api_pb2.CONTAINER_EXITED)
        assert status.reason == "GuestPanicked"


async def test_watches_that_worked_are_begun_again_after_a_short_pause(
    fleet: Fleet, kubelet: Kubelet
) -> None:
    assert await kubelet.call("Version")
    async with asyncio.timeout(4):  # pauses that grow need at least 5 s
        for _ in range(8):
            await fleet.end_watch()
