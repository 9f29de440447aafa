"""The resources of a running pod change live, as its node enforces them, or are refused clearly."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from grpc import StatusCode
from services.cri.tests.world import Fleet, Kubelet, cri, sandbox

from virtbus.schemas.resources import Resources, ResourcesInForce
from virtbus.schemas.states import VmState
from virtbus.schemas.vm_status import Condition

GIVEN = {"cpu_quota": 150_000, "cpu_period": 100_000, "memory_limit_in_bytes": 2**27}
NO_LISTS = ("one", ",", "0,,1", "0,", "1-", " 3", "+3", "\u0663", "3\n")
MORE: dict[str, Any] = {
    "cpu_shares": 512,
    "cpu_quota": 200_000,
    "cpu_period": 100_000,
    "cpuset_cpus": "0-1",
}


async def running(kubelet: Kubelet, given: dict[str, Any] = GIVEN, **of_pod: Any) -> str:
    sandbox_id = await kubelet.sandbox(**of_pod)
    container_id = await kubelet.container(sandbox_id, linux={"resources": given})
    await kubelet.call("StartContainer", container_id=container_id)
    return container_id


async def shown(kubelet: Kubelet, container_id: str) -> tuple[int, int, str, int]:
    linux = (await kubelet.status(container_id)).resources.linux
    return linux.cpu_shares, linux.cpu_quota, linux.cpuset_cpus, linux.memory_limit_in_bytes


async def resize(kubelet: Kubelet, container_id: str, **change: Any) -> None:
    await kubelet.call("UpdateContainerResources", container_id=container_id, linux=change)


async def test_a_vm_has_the_limits_of_its_container_from_the_start(
    fleet: Fleet, kubelet: Kubelet
) -> None:
    await running(kubelet, GIVEN | {"cpu_shares": 1})
    domain = fleet.vm.spec.domain
    assert (domain.cpu.vcpus, domain.memory.guest) == (2, 2**27)
    wanted = {"cpu_shares": 2, "cpu_quota_us": 150_000, "memory_bytes": 2**27}
    assert domain.resources == Resources.model_validate(wanted)


async def test_cpus_and_memory_change_live_and_a_repeat_changes_nothing(
    fleet: Fleet, kubelet: Kubelet
) -> None:
    container_id = await running(kubelet)
    for _ in range(2):
        await resize(kubelet, container_id, **MORE, memory_limit_in_bytes=2**26)
    assert await shown(kubelet, container_id) == (512, 200_000, "0-1", 2**26)
    assert len(fleet.asked("vm.update")) == 1
    domain = fleet.vm.spec.domain
    assert (domain.cpu.vcpus, domain.memory.guest) == (2, 2**27), "the guest's hardware stays"
    await resize(kubelet, container_id, memory_limit_in_bytes=2**27)
    assert await shown(kubelet, container_id) == (512, 200_000, "0-1", 2**27)


async def test_the_status_shows_what_the_node_enforces_and_a_restart_keeps_it(
    fleet: Fleet, tmp_path: Path
) -> None:
    async with fleet.serving():
        async with cri(tmp_path, fleet) as kubelet:
            container_id = await running(kubelet)
            fleet.enforces = False
            why = "the guest still has 134217728 bytes of memory"
            fleet.show(
                fleet.vm.uid,
                resources=ResourcesInForce(cpu_quota_us=150_000, memory_bytes=2**27),
                conditions=(Condition(type="ResourcesPending", status=True, message=why),),
            )
            code, text = await kubelet.refused(
                "UpdateContainerResources",
                timeout_s=3,
                container_id=container_id,
                linux={"memory_limit_in_bytes": 2**26, "cpu_quota": 50_000, "cpu_period": 100_000},
            )
            assert (code, why in text) == (StatusCode.UNAVAILABLE, True), text
            assert await shown(kubelet, container_id) == (0, 150_000, "", 2**27)
        async with cri(tmp_path, fleet) as kubelet:
            assert await shown(kubelet, container_id) == (0, 150_000, "", 2**27)
            fleet.enforce(fleet.vm.uid)
            async with asyncio.timeout(20):
                while await shown(kubelet, container_id) != (0, 50_000, "", 2**26):
                    await asyncio.sleep(0.01)


async def test_limits_that_the_host_cannot_set_are_shown_as_none(
    fleet: Fleet, kubelet: Kubelet
) -> None:
    container_id = await running(kubelet, GIVEN | MORE)
    assert await shown(kubelet, container_id) == (512, 200_000, "0-1", 2**27)
    fleet.enforces = False
    why = "no cgroups"
    fleet.show(
        fleet.vm.uid,
        resources=None,
        conditions=(Condition(type="ResourcesPending", status=True, message=why),),
    )
    async with asyncio.timeout(20):
        while await shown(kubelet, container_id) != (0, -1, "", 0):
            await asyncio.sleep(0.01)
    code, text = await kubelet.refused(
        "UpdateContainerResources", timeout_s=3, container_id=container_id, linux=MORE
    )
    assert (code, why in text) == (StatusCode.UNAVAILABLE, True), text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"cpu_quota": 210_000, "cpu_period": 100_000}, "2 vCPUs"),
        ({"memory_limit_in_bytes": 2**30}, "virtbus.io/memory-max"),
        ({"cpuset_mems": "1"}, "NUMA"),
    ],
)
async def test_what_a_running_guest_cannot_get_is_refused_with_the_next_step(
    fleet: Fleet, kubelet: Kubelet, change: dict[str, Any], words: str
) -> None:
    container_id = await running(kubelet)
    before = await kubelet.status(container_id)
    code, text = await kubelet.refused(
        "UpdateContainerResources", container_id=container_id, linux=change
    )
    assert (code, words in text) == (StatusCode.UNIMPLEMENTED, True), text
    assert await kubelet.status(container_id) == before
    assert not fleet.asked("vm.update")


async def test_wrong_resources_are_refused(kubelet: Kubelet) -> None:
    container_id = await running(kubelet)
    lists = (*NO_LISTS, ",".join(["0"] * 1024))
    for change in ({"memory_limit_in_bytes": 2**20}, *({"cpuset_cpus": one} for one in lists)):
        code, _ = await kubelet.refused(
            "UpdateContainerResources", container_id=container_id, linux=change
        )
        assert code is StatusCode.INVALID_ARGUMENT, change


async def test_a_quota_without_a_period_is_at_most_the_kernels(kubelet: Kubelet) -> None:
    await running(kubelet, {"cpu_quota": 2**62})


async def test_memory_grows_up_to_the_annotation(fleet: Fleet, kubelet: Kubelet) -> None:
    container_id = await running(kubelet, annotations={"virtbus.io/memory-max": "512Mi"})
    domain = fleet.vm.spec.domain
    assert domain.memory.guest == 2**29
    assert domain.resources is not None
    assert domain.resources.memory_bytes == 2**27
    await resize(kubelet, container_id, memory_limit_in_bytes=2**28)
    assert (await shown(kubelet, container_id))[3] == 2**28


async def test_a_wrong_annotation_is_refused_at_once(kubelet: Kubelet) -> None:
    config = sandbox(annotations={"virtbus.io/memory-max": "much"})
    code, text = await kubelet.refused("RunPodSandbox", config=config)
    assert (code, "memory-max" in text) == (StatusCode.INVALID_ARGUMENT, True), text


async def test_the_next_attempt_of_a_container_has_other_cpus_and_memory(
    fleet: Fleet, kubelet: Kubelet
) -> None:
    sandbox_id = await kubelet.sandbox()
    container_id = await kubelet.container(sandbox_id, linux={"resources": GIVEN})
    await kubelet.call("StartContainer", container_id=container_id)
    await kubelet.call("StopContainer", container_id=container_id)
    more = {"cpu_quota": 400_000, "cpu_period": 100_000, "memory_limit_in_bytes": 2**30}
    uid = fleet.vm.uid
    again = await kubelet.container(sandbox_id, 1, linux={"resources": more})
    domain = fleet.vm.spec.domain
    assert (domain.cpu.vcpus, domain.memory.guest) == (4, 2**30)
    await kubelet.call("StartContainer", container_id=again)
    assert (fleet.vm.uid, fleet.vm.state) == (uid, VmState.RUNNING)


async def test_a_resize_while_the_bus_is_away_says_so(fleet: Fleet, kubelet: Kubelet) -> None:
    container_id = await running(kubelet)
    fleet.cut()
    code, _ = await kubelet.refused(
        "UpdateContainerResources", container_id=container_id, linux=MORE, timeout_s=5
    )
    assert code is StatusCode.UNAVAILABLE
    assert (await shown(kubelet, container_id))[1] == 150_000


async def test_the_resources_of_a_pod_are_those_of_its_container(
    fleet: Fleet, kubelet: Kubelet
) -> None:
    """kubelet tells them before each resize, and then resizes the container."""
    sandbox_id = await kubelet.sandbox()
    told: dict[str, Any] = {
        "pod_sandbox_id": sandbox_id,
        "resources": {"cpu_shares": 512, "memory_limit_in_bytes": 2**28},
    }
    await kubelet.call("UpdatePodSandboxResources", **told)
    code, _ = await kubelet.refused("UpdatePodSandboxResources", pod_sandbox_id="f" * 64)
    assert code == StatusCode.NOT_FOUND
    container_id = await kubelet.container(sandbox_id, linux={"resources": GIVEN})
    await kubelet.call("StartContainer", container_id=container_id)
    await kubelet.call("UpdatePodSandboxResources", **told)
    assert (await shown(kubelet, container_id))[3] == GIVEN["memory_limit_in_bytes"]
    assert not fleet.asked("vm.update")
