"""A guest that writes all the time is backed up, and each backup has one instant of its disks."""

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.platform import POOL, Platform, Refused, Stage, until
from tests.e2e.test_live_snapshots import starts, writing, written
from tests.e2e.test_volumes import make_pool, remove_pool

from virtbus.schemas.pool import LOCAL

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


def backup(platform: Platform, *more: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(platform.cli("backup", "create", "web", *more, "-o", "json"))
    return found


def guest_dies(platform: Platform) -> None:
    """End the QEMU of the VM `web` as a crash of the host does."""
    uid = platform.get("web")["uid"]
    found = subprocess.run(["pgrep", "-f", f"[g]uest=vb-{uid}"], capture_output=True, check=True)
    os.kill(int(found.stdout.split()[0]), signal.SIGKILL)


def restored(platform: Platform, id_: str, vm: str) -> tuple[int, int]:
    """Make a VM of a backup; return what its guest finds on its disks."""
    platform.cli("backup", "restore", id_, "--name", vm)
    log = lambda: platform.console_log(vm)[-2000:]  # noqa: E731
    found: dict[str, tuple[int, int]] = until(lambda: starts(platform, vm), log, within_s=150)
    platform.cli("vm", "stop", vm, "--grace", "0", "--wait")
    return next(iter(found.values()))


def ended(platform: Platform, *vms: str, pool: Path | None = None) -> None:
    """Delete the VMs with their volumes, operations and pool; nothing of them is left."""
    for vm in vms:
        platform.delete(vm)
    volumes = json.loads(platform.cli("volume", "list", "-o", "json"))["items"]
    platform.cli("volume", "delete", *(one["name"] for one in volumes))
    if pool is not None:
        remove_pool(pool)
    done = json.loads(platform.cli("operation", "list", "-o", "json"))["items"]
    platform.cli("operation", "delete", *(item["id"] for item in done))
    platform.nothing_left()


def test_an_increment_is_verified_and_restored_with_one_instant_of_all_disks(
    platform: Platform, tmp_path: Path
) -> None:
    pool = make_pool(platform)
    writing(platform, tmp_path, pools=(LOCAL, POOL))
    first = backup(platform)
    assert first["full_because"] == "it is the first backup of the VM"
    taken = written(platform)
    until(lambda: written(platform) > taken + 2, "the guest writes on")

    low = written(platform)
    second = backup(platform)
    high = written(platform) + 1
    assert (second["parent"], second["depth"]) == (first["id"], 1)
    assert second["size_bytes"] < first["size_bytes"] / 4
    platform.cli("backup", "verify", second["id"])
    with pytest.raises(Refused) as refused:
        platform.cli("backup", "delete", first["id"], "-o", "json")
    assert refused.value.error["reason"] == "backup_needed"
    platform.cli("vm", "stop", "web", "--grace", "0", "--wait")

    one, two = restored(platform, second["id"], "web2")
    assert low <= two <= high
    assert one - two in {0, 1}
    platform.cli("backup", "delete", second["id"], first["id"])
    assert not list((platform.base / "backups").iterdir())
    ended(platform, "web", "web2", pool=pool)


@pytest.mark.long
def test_a_backup_is_restored_into_a_fleet_that_never_knew_the_vm(
    stage: Stage, tmp_path: Path
) -> None:
    shared = tmp_path / "backups"
    shared.mkdir()
    environ = {"VIRTBUS_BACKUP_DIR": str(shared)}
    with stage.apart(environ) as source:
        writing(source, tmp_path)
        low = written(source)
        id_ = backup(source)["id"]
        high = written(source) + 1
        ended(source, "web")
    with stage.apart(environ) as other:  # another bus and node: only the directory is the same
        assert json.loads(other.cli("vm", "list", "-o", "json"))["items"] == []
        (found,) = json.loads(other.cli("backup", "list", "-o", "json"))["items"]
        assert (found["id"], found["vm"]) == (id_, "web")
        other.cli("backup", "verify", id_)
        one, two = restored(other, id_, "web")
        assert low <= two <= high
        assert one - two in {0, 1}
        other.cli("backup", "delete", id_)
        assert not list(shared.iterdir())
        ended(other, "web")


@pytest.mark.long
def test_each_backup_says_why_it_is_full_and_damage_is_found(
    platform: Platform, tmp_path: Path
) -> None:
    writing(platform, tmp_path)
    first = backup(platform)
    guest_dies(platform)
    taken = written(platform)
    until(lambda: written(platform) > taken, "the guest is started again", within_s=150)
    second = backup(platform)
    assert "ended without a stop" in second["full_because"]

    platform.cli("vm", "stop", "web", "--grace", "0", "--wait")
    third = backup(platform)
    assert (third["parent"], third["depth"]) == (second["id"], 1)
    assert third["size_bytes"] < second["size_bytes"] / 4
    one, two = restored(platform, third["id"], "web2")
    assert one - two in {0, 1}

    platform.cli("vm", "start", "web", "--wait")
    taken = written(platform)
    until(lambda: written(platform) > taken, "the guest writes again", within_s=150)
    fourth = backup(platform)
    assert fourth["parent"] == second["id"]

    platform.cli("snapshot", "create", "s", "--vm", "web")
    fifth = backup(platform)
    assert "has other layers" in fifth["full_because"]

    items = json.loads(platform.cli("backup", "list", "-o", "json"))["items"]
    ids = [one["id"] for one in items]
    assert ids == [one["id"] for one in (first, second, third, fourth, fifth)]
    damaged = platform.base / "backups" / third["id"] / "root.qcow2"
    damaged.chmod(0o600)
    with damaged.open("r+b") as file:
        file.seek(200_000)
        file.write(b"damaged")
    with pytest.raises(Refused) as refused:
        platform.cli("backup", "verify", third["id"], "-o", "json")
    assert refused.value.error["reason"] == "backup_damaged"
    platform.cli("backup", "delete", *reversed(ids))
    assert not list((platform.base / "backups").iterdir())
    platform.cli("snapshot", "delete", "s")
    layers = platform.state_dir / "disks" / "layers"
    platform.delete("web")
    for one in json.loads(platform.cli("volume", "list", "-o", "json"))["items"]:
        if one["name"].startswith("data-"):
            platform.cli("volume", "delete", one["name"])
    until(lambda: not list(layers.glob("*")), "layers that nothing needs are removed", within_s=120)
    ended(platform, "web2")


def test_a_schedule_makes_verified_backups(platform: Platform) -> None:
    platform.create("web", "--image", "tiny", "--memory", "128MiB", wait="ready")
    platform.cli("backup", "schedule", "create", "often", "--vm", "web", "--every", "5m")

    def made() -> dict[str, Any]:
        seen = json.loads(platform.cli("backup", "schedule", "get", "often", "-o", "json"))
        return seen if seen.get("last_backup") else {}

    view = until(made, "the first run succeeds", within_s=150)
    assert (view["state"], view.get("message", "")) == ("Waiting", "")
    (one,) = json.loads(platform.cli("backup", "list", "-o", "json"))["items"]
    assert (one["id"], one["schedule"], one["verified_ns"] > 0) == (
        *(view["last_backup"], "often"),
        True,
    )
    platform.cli("backup", "schedule", "delete", "often")
    platform.cli("backup", "delete", one["id"])
    platform.delete("web")
    done = json.loads(platform.cli("operation", "list", "-o", "json"))["items"]
    platform.cli("operation", "delete", *(item["id"] for item in done))
    platform.nothing_left()
