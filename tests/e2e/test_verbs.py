"""Pausing and restarting a real guest."""

import pytest
from tests.e2e import host
from tests.e2e.platform import Platform, Refused, address, until

pytestmark = pytest.mark.e2e
BOOT = "GUEST-READY"


def test_a_paused_guest_answers_again_after_an_agent_that_died(patient: Platform) -> None:
    view = patient.create("still", wait="ready")
    patient.cli("vm", "pause", "still")
    paused = patient.get("still")
    assert paused["state"] == "Paused"
    assert "Ready" not in {c["type"] for c in paused["conditions"] if c["status"]}
    assert not host.ping(address(view), wait_s=1)
    patient.wait_back("nodeagent", patient.kill("nodeagent"))
    patient.wait_whole()
    assert patient.get("still")["state"] == "Paused"
    pids = host.qemu_pids(view["uid"])
    patient.cli("vm", "unpause", "still")
    assert host.ping(address(view))
    assert host.qemu_pids(view["uid"]) == pids
    assert {"domain.paused", "domain.resumed"} <= set(patient.events("still"))


def test_a_paused_start_runs_no_instruction_before_it_is_resumed(platform: Platform) -> None:
    view = platform.create("late", wait="ready")
    platform.cli("vm", "stop", "late")
    platform.cli("vm", "start", "late", "--paused")
    assert platform.get("late")["state"] == "Paused"
    assert host.qemu_pids(view["uid"])
    assert platform.console_log("late") == ""
    platform.cli("vm", "unpause", "late")
    platform.wait_ready("late")  # the guest answers a ping before it prints
    until(lambda: platform.console_log("late"), "output of the guest that runs")


def test_a_restart_starts_one_new_guest_with_its_changed_spec(platform: Platform) -> None:
    view = platform.create("again", wait="ready")
    (pid,) = host.qemu_pids(view["uid"])
    spec = view["spec"]
    spec["domain"]["memory"]["guest"] = 160 * 1024**2
    now = platform.get("again")
    platform.ask("vm.update", {"uid": view["uid"], "revision": now["revision"], "spec": spec})
    platform.cli("vm", "restart", "again")
    (after,) = platform.wait_ready("again")
    (new,) = host.qemu_pids(view["uid"])
    assert new != pid
    assert after["restarts"] == 0
    assert address(after) == address(view)
    until(
        lambda: "RestartRequired" not in {c["type"] for c in platform.get("again")["conditions"]},
        "the new spec is in force",
    )


def test_a_paused_guest_is_deleted_and_a_stopped_one_is_refused(platform: Platform) -> None:
    platform.create("gone", wait="running")
    platform.cli("vm", "pause", "gone")
    platform.delete("gone", grace_s=None)
    platform.create("off", wait="running")
    platform.cli("vm", "stop", "off", "--grace", "0")
    with pytest.raises(Refused, match="not running"):
        platform.cli("vm", "pause", "off")


def _boots(platform: Platform, times: int) -> None:
    """Wait until the console log contains this many boots."""
    until(
        lambda: platform.console_log("boots").count(BOOT) >= times,
        lambda: platform.console_log("boots")[-2000:],
        within_s=120,
    )


def test_a_reset_and_a_soft_reboot_reboot_the_same_machine(platform: Platform) -> None:
    view = platform.create("boots", wait="ready")
    _boots(platform, 1)
    pids = host.qemu_pids(view["uid"])
    for verb, times in (("reset", 2), ("soft-reboot", 3)):
        platform.cli("vm", verb, "boots")
        _boots(platform, times)
        until(lambda: host.ping(address(view), wait_s=1), "it is back", within_s=60)
    assert host.qemu_pids(view["uid"]) == pids
    after = platform.get("boots")
    assert (after["state"], after["restarts"]) == ("Running", 0)
    assert after["reboots"] >= 2
    assert {"guest.reset", "guest.rebooting", "guest.rebooted"} <= set(platform.events("boots"))
