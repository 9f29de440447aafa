"""A guest that writes all the time is backed up, and each backup has one instant of its disks."""

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.platform import Platform, Refused, until
from tests.e2e.test_live_snapshots import starts, writing, written

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


def test_an_increment_is_verified_and_restored_with_one_instant_of_all_disks(
    platform: Platform, tmp_path: Path
) -> None:
    writing(platform, tmp_path)
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

    one, two = restored(platform, second["id"], "web2")
    assert low <= two <= high
    assert one - two in {0, 1}

    guest_dies(platform)
    taken = written(platform)
    until(lambda: written(platform) > taken, "the guest is started again", within_s=150)
    third = backup(platform)
    assert "ended without a stop" in third["full_because"]

    platform.cli("vm", "stop", "web", "--grace", "0", "--wait")
    fourth = backup(platform)
    assert fourth["full_because"] == "the VM was off"
    one, two = restored(platform, fourth["id"], "web3")
    assert one == two or one - two == 1

    platform.cli("vm", "start", "web", "--wait")
    taken = written(platform)
    until(lambda: written(platform) > taken, "the guest writes again", within_s=150)
    fifth = backup(platform)
    assert fifth["parent"] == third["id"]

    items = json.loads(platform.cli("backup", "list", "-o", "json"))["items"]
    ids = [one["id"] for one in items]
    assert ids == [first["id"], second["id"], third["id"], fourth["id"], fifth["id"]]
    damaged = Path(platform.base) / "backups" / third["id"] / "root.qcow2"
    damaged.chmod(0o600)
    with damaged.open("r+b") as file:
        file.seek(200_000)
        file.write(b"damaged")
    with pytest.raises(Refused) as refused:
        platform.cli("backup", "verify", third["id"], "-o", "json")
    assert refused.value.error["reason"] == "backup_damaged"
    platform.cli("backup", "delete", *reversed(ids))
    assert not list((platform.base / "backups").iterdir())
    for vm in ("web", "web2", "web3"):
        platform.delete(vm)
    volumes = json.loads(platform.cli("volume", "list", "-o", "json"))["items"]
    platform.cli("volume", "delete", *(one["name"] for one in volumes))
    done = json.loads(platform.cli("operation", "list", "-o", "json"))["items"]
    platform.cli("operation", "delete", *(item["id"] for item in done))
    platform.nothing_left()
