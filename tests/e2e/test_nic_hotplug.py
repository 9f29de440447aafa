"""Interfaces that are plugged into a booted guest and unplugged from it."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e import host
from tests.e2e.login import Login
from tests.e2e.nic_rounds import GATEWAY, Web
from tests.e2e.platform import HALT, Json, Platform, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def restart_libvirtd() -> None:
    """Restart libvirtd. Only a host that the tests made has one of its own."""
    assert host.BOX.exists(), "run these tests by tools/in-own-host"
    os.kill(int(host.LIBVIRTD_PID.read_text()), signal.SIGTERM)
    until(lambda: not host.LIBVIRTD_PID.exists(), "libvirtd has ended")
    host.run("libvirtd", "-d")
    alive = ("virsh", "-q", "-r", "-c", "qemu:///system", "uri")
    until(lambda: host.run(*alive, check=False).strip(), "libvirtd answers")


@pytest.fixture
def web(patient: Platform, tmp_path: Path) -> Iterator[Web]:
    login = Login(tmp_path)
    view = patient.create("web", "--ssh-key", login.public_key, wait="ready")
    yield Web(patient, login, view)
    patient.delete("web")


def test_a_plugged_interface_survives_all_restarts(web: Web) -> None:
    platform = web.platform
    web.rounds(2)
    nic = web.plug()
    web.use(nic)
    uid = web.view["uid"]
    assert nic["mac"] in host.run("virsh", "-c", "qemu:///system", "dumpxml", f"vb-{uid}")
    lent = host.run("ip", "-o", "link")
    assert " vt" not in lent, "the tap is in the namespace of the VM"

    platform.stop()
    restart_libvirtd()
    platform.start()
    name = web.device(nic)
    assert " 0% packet loss" in web(f"ping -c 2 -W 5 -I {name} {GATEWAY}")
    web.unplug("default")
    nics = web.nics()
    assert list(nics) == ["more"]
    assert nics["more"]["addresses"] == nic["addresses"]
    begun = platform.get("web")["started_ns"]
    platform.cli("vm", "restart", "web", "--grace", "0")
    until(lambda: platform.get("web").get("started_ns") not in {begun, None}, "restarted")
    (view,) = platform.wait_ready("web")
    (after,) = view["interfaces"]
    assert (after["mac"], after["addresses"]) == (nic["mac"], nic["addresses"])
    web.view = view
    assert web("ls /sys/class/net | sort").split() == ["eth0", "lo"]
    explained = json.loads(platform.cli("vm", "net", "web", "--check", "-o", "json"))
    assert explained["faults"] == []


def test_a_guest_that_releases_nothing_is_shown_and_asked_again_until_it_restarts(
    platform: Platform,
) -> None:
    uid = platform.create("silent", "--image", HALT, "--memory", "64MiB")["uid"]
    platform.cli("vm", "nic", "add", "silent", "--name", "more")

    def plugs() -> dict[str, str]:
        nics = platform.get("silent").get("interfaces") or ()
        return {one["name"]: one.get("plug", "plugged") for one in nics}

    until(lambda: plugs() == {"default": "plugged", "more": "plugged"}, "plugged")
    for nic in ("default", "more"):
        platform.cli("vm", "nic", "remove", "silent", nic)

    def asked() -> Json | None:
        found = platform.get("silent")["conditions"]
        return next((one for one in found if one["type"] == "NicChangePending"), None)

    shown = until(asked, "the condition")
    assert shown["reason"] == "NotReleased"
    assert "the guest has not released" in platform.get("silent")["message"]
    time.sleep(8)  # QEMU refuses a second request while the first is fresh
    again = until(asked, "the condition")
    assert again["reason"] == "NotReleased", again
    assert plugs() == {"default": "leaving", "more": "leaving"}
    told = json.loads(platform.cli("vm", "net", "silent", "-o", "json"))
    assert [one["status"]["plug"] for one in told["interfaces"]] == ["leaving", "leaving"]
    checked = platform.try_cli("vm", "net", "silent", "--check")
    assert checked.returncode == 1
    assert "the guest has not released the device yet" in checked.stdout
    platform.cli("vm", "restart", "silent", "--grace", "0")
    until(lambda: plugs() == {} and asked() is None, "no interface after the restart")
    platform.wait_state("silent", "Running")
    assert f"netns vb-{uid}" not in platform.cli("node", "audit")
    platform.delete("silent")


@pytest.mark.long
def test_ten_rounds_of_plug_traffic_and_unplug(web: Web) -> None:
    web.rounds(10)
