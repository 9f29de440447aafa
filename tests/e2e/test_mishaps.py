"""Guests that fail by themselves: a kernel panic, and a watchdog that nobody feeds."""

import json
from pathlib import Path

import pytest
from tests.e2e import host
from tests.e2e.login import Login
from tests.e2e.platform import Json, Platform, until

pytestmark = pytest.mark.e2e

BITE = """for d in /sys/bus/pci/devices/*; do
    [ "$(cat $d/vendor $d/device | tr -d '\\n')" = 0x80860x25ab ] || continue
    printf '\\004\\000' | dd of=$d/config bs=2 seek=48 conv=notrunc
    printf '\\002' | dd of=$d/config bs=1 seek=104 conv=notrunc
done"""
"""Sets the 6300ESB to its fast clock, on which it fires after two seconds, and enables it.

This uses its PCI configuration (60h and 68h), because the tiny guest's kernel has no driver.
"""


def create(platform: Platform, file: Path, login: Login, strategy: str, action: str) -> Json:
    devices = {"watchdog": {"i6300esb": {"action": action}}}
    wanted = {
        "name": "own",
        "image": "tiny",
        "memory": "128MiB",
        "ssh_keys": [Path(login.public_key).read_text().strip()],
        "spec": {"run_strategy": strategy, "domain": {"devices": devices}},
    }
    file.write_text(json.dumps(wanted))
    return platform.create("own", "-f", str(file), wait="ready")


def test_panics_and_watchdogs_are_distinguished_from_crashes(
    platform: Platform, tmp_path: Path
) -> None:
    login, file = Login(tmp_path), tmp_path / "vm.json"
    view = create(platform, file, login, "RerunOnFailure", "poweroff")
    (pid,) = host.qemu_pids(view["uid"])
    login(view, "(sleep 1; echo c > /proc/sysrq-trigger) > /dev/null 2>&1 &")
    until(lambda: platform.get("own")["restarts"] == 1, "the panic is seen")
    (again,) = platform.wait_ready("own")
    assert (again["last_exit"]["how"], again["last_exit"]["asked"]) == ("panicked", False)
    assert again["last_exit"]["at_ns"] > view["started_ns"]
    assert host.qemu_pids(view["uid"]) not in ([pid], [])
    assert "panicked by itself" in platform.cli("vm", "get", "own")

    login(again, BITE)
    until(lambda: platform.get("own")["restarts"] == 2, "the watchdog fires")
    again = platform.wait_state("own", "Running")
    assert (again["last_exit"]["how"], again["last_exit"]["asked"]) == ("watchdog", False)
    assert {"guest.panicked", "guest.watchdog"} <= set(platform.events("own"))


@pytest.mark.long
def test_a_watchdog_resets_its_guest(platform: Platform, tmp_path: Path) -> None:
    login = Login(tmp_path)
    view = create(platform, tmp_path / "vm.json", login, "Once", "reset")
    login(view, BITE)
    until(lambda: platform.get("own")["reboots"] == 1, "the watchdog fires")
    (again,) = platform.wait_ready("own")
    assert again["last_exit"] is None
    assert host.qemu_pids(view["uid"])
    assert "guest.watchdog" in platform.events("own")
