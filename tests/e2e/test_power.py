"""Stopping, starting and changing an existing VM."""

import json
from pathlib import Path

import pytest
from tests.e2e import host
from tests.e2e.login import Login
from tests.e2e.platform import HALT, Json, Platform, Refused, until

pytestmark = pytest.mark.e2e


@pytest.fixture
def login(tmp_path: Path) -> Login:
    return Login(tmp_path)


def test_guest_that_powers_off_stays_off_under_once(
    platform: Platform, login: Login, tmp_path: Path
) -> None:
    wanted = {
        "name": "own",
        "image": "tiny",
        "memory": "128MiB",
        "ssh_keys": [Path(login.public_key).read_text().strip()],
        "spec": {"run_strategy": "Once"},
    }
    path = tmp_path / "vm.json"
    path.write_text(json.dumps(wanted))
    view = platform.create("own", "-f", str(path), wait="ready")
    login(view, "poweroff")
    ended = platform.wait_state("own", "Succeeded")
    assert ended["restarts"] == 0
    end = ended["last_exit"]
    assert (end["how"], end["asked"]) == ("shut down", False)
    assert end["at_ns"] > view["started_ns"]
    assert not host.qemu_pids(view["uid"])


def test_killed_emulator_is_started_again_once(platform: Platform) -> None:
    view = platform.create("hit", "--image", HALT, wait="running")
    (pid,) = host.qemu_pids(view["uid"])
    host.run("kill", "-9", str(pid))
    until(lambda: host.qemu_pids(view["uid"]) not in ([pid], []), "a new one", within_s=20)
    again = platform.wait_state("hit", "Running")
    assert again["restarts"] == 1
    assert (again["last_exit"]["how"], again["last_exit"]["asked"]) == ("crashed", False)
    assert len(host.qemu_pids(view["uid"])) == 1


def test_labels_change_at_once_and_memory_at_the_next_start(platform: Platform) -> None:
    view = platform.create("up", "--image", HALT, "--label", "tier=back", wait="running")
    changed = platform.ask(
        "vm.update",
        {"uid": view["uid"], "revision": view["revision"], "labels": {"tier": "front"}},
    )
    assert changed["labels"] == {"tier": "front"}
    assert [vm["name"] for vm in _listed(platform, "tier=front")] == ["up"]
    assert _listed(platform, "tier=back") == []

    spec = platform.get("up")["spec"]
    spec["domain"]["memory"]["guest"] = 160 * 1024**2
    spec["volumes"][1]["cloud_init_no_cloud"] = {"hostname": "up"}
    revision = platform.get("up")["revision"]
    platform.ask("vm.update", {"uid": view["uid"], "revision": revision, "spec": spec})
    until(lambda: _required(platform.get("up")), "RestartRequired")
    assert host.qemu_pids(view["uid"]), "it runs on meanwhile"
    platform.cli("vm", "stop", "up", "--grace", "0")
    platform.cli("vm", "start", "up")
    after = platform.wait_state("up", "Running")
    assert not _required(after)
    xml = host.run("virsh", "-q", "-c", "qemu:///system", "dumpxml", f"vb-{view['uid']}")
    assert f"<memory unit='KiB'>{160 * 1024}</memory>" in xml


def _listed(platform: Platform, label: str) -> list[Json]:
    items: list[Json] = json.loads(platform.cli("vm", "list", "-l", label, "-o", "json"))["items"]
    return items


def _required(view: Json) -> bool:
    return any(c["type"] == "RestartRequired" and c["status"] for c in view["conditions"])


def test_fields_that_cannot_change_are_named(platform: Platform) -> None:
    view = platform.create("fix", "--image", HALT, wait="running")
    spec = platform.get("fix")["spec"]
    spec["volumes"][0]["image"]["ref"] = "other"
    wanted = {"uid": view["uid"], "revision": view["revision"], "spec": spec}
    with pytest.raises(Exception, match="cannot change") as refused:
        platform.ask("vm.update", wanted)
    assert getattr(refused.value, "code", None) == 422
    stale = {"uid": view["uid"], "revision": view["revision"] - 1, "labels": {}}
    with pytest.raises(Exception, match="changed meanwhile") as refused:
        platform.ask("vm.update", stale)
    assert getattr(refused.value, "code", None) == 409


def test_start_of_a_vm_that_runs_changes_nothing(platform: Platform) -> None:
    view = platform.create("on", "--image", HALT, wait="running")
    (pid,) = host.qemu_pids(view["uid"])
    platform.cli("vm", "start", "on")
    assert host.qemu_pids(view["uid"]) == [pid]
    with pytest.raises(Refused):
        platform.cli("vm", "start", "nobody")


def test_a_paused_guest_is_deleted_and_a_stopped_one_is_refused(platform: Platform) -> None:
    platform.create("gone", wait="running")
    platform.cli("vm", "pause", "gone")
    platform.delete("gone", grace_s=None)
    platform.create("off", wait="running")
    platform.cli("vm", "stop", "off", "--grace", "0")
    with pytest.raises(Refused, match="not running"):
        platform.cli("vm", "pause", "off")
