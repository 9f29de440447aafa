"""restartPolicy, how the guest ended, and reboots: the exits by which kubelet decides.

kubelet decides by the exit code; the test does what kubelet does then.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
from services.cri.tests.world import Fleet, Kubelet, cri

CREATED, RUNNING, EXITED = 0, 1, 2
ENDS = {
    "shut down": (0, "Completed"),
    "ended": (137, "Error"),
    "crashed": (134, "EmulatorDied"),
    "panicked": (1, "GuestPanicked"),
    "watchdog": (124, "WatchdogExpired"),
}
POLICIES: dict[str, Callable[[int], bool]] = {
    "Always": lambda _: True,
    "OnFailure": lambda exit_code: exit_code != 0,
    "Never": lambda _: False,
}
"""By restartPolicy: kubelet starts another attempt after this exit code."""


@pytest.mark.parametrize("reboot", [False, True])
@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize("policy", POLICIES)
async def test_an_end_is_reported_as_it_was_and_only_kubelet_starts_the_next_attempt(
    tmp_path: Path, fleet: Fleet, policy: str, how: str, *, reboot: bool
) -> None:
    async with cri(tmp_path, fleet) as kubelet:
        sandbox_id, container_id = await kubelet.running()
        uid = fleet.vm.uid
        if not reboot:
            fleet.end(how)
            await kubelet.until_state(container_id, EXITED)
    if reboot:  # the guest ended while nobody watched
        fleet.end(how)
    async with cri(tmp_path, fleet) as kubelet:
        status = await kubelet.until_state(container_id, EXITED)
        last = fleet.vm.last_exit
        assert last is not None
        assert (status.exit_code, status.reason) == ENDS[how]
        assert status.finished_at == last.at_ns
        assert status.started_at < status.finished_at
        assert len(fleet.asked("vm.start")) == 1
        if POLICIES[policy](status.exit_code):
            await next_attempt(kubelet, sandbox_id)
            assert fleet.vm.uid == uid  # with the same root disk
    assert len(fleet.created) == 1


async def next_attempt(kubelet: Kubelet, sandbox_id: str) -> None:
    """Do what kubelet does for a restart."""
    container_id = await kubelet.container(sandbox_id, attempt=1)
    await kubelet.call("StartContainer", container_id=container_id)
    assert (await kubelet.status(container_id)).state == RUNNING


@pytest.mark.parametrize("how", ENDS)
async def test_a_guest_that_ended_stays_off_over_a_reboot_of_its_host(
    tmp_path: Path, fleet: Fleet, how: str
) -> None:
    async with cri(tmp_path, fleet) as kubelet:
        _, container_id = await kubelet.running()
        fleet.end(how)
        await kubelet.until_state(container_id, EXITED)
        while fleet.vm.powered:  # an agent starts no VM whose record is off
            await kubelet.call("Status")
    assert fleet.vm.spec.run_strategy == "Manual"


@pytest.mark.parametrize("grace_s", [0, 7, 120])
async def test_a_stop_gives_the_guest_the_grace_of_its_pod(
    fleet: Fleet, kubelet: Kubelet, grace_s: int
) -> None:
    _, container_id = await kubelet.running()
    await kubelet.call("StopContainer", container_id=container_id, timeout=grace_s)
    assert fleet.asked("vm.stop")[-1]["grace_s"] == grace_s
    status = await kubelet.status(container_id)
    assert (status.state, status.exit_code, status.reason) == (EXITED, 0, "Completed")
