"""From 0.1 to 0.2: old state is refused, guests run on, and exported VMs are created again."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.e2e import host
from tests.e2e.platform import HALT, Platform
from tests.hosts.older import python_of

FIRST = "60f6d51"
"""A commit of 0.1, before the names of 0.2."""
SEED = "#cloud-config\nhostname: kept\n"

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(600)]


def use(platform: Platform, python: Path) -> None:
    platform.environ["PATH"] = f"{python.parent}:{os.environ['PATH']}"


def refused_up(platform: Platform) -> str:
    done = subprocess.run(
        ["virtbus", "up"], env=platform.environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stdout
    return done.stderr


def test_the_documented_path_from_the_first_version(tmp_path: Path) -> None:
    host.refuse_the_machines_own_network()
    platform = Platform()
    try:
        _walk(platform, tmp_path)
    finally:
        platform.wipe()


def _walk(platform: Platform, tmp_path: Path) -> None:
    use(platform, python_of(FIRST))
    platform.start()
    (tmp_path / "seed").write_text(SEED)
    seeded = ("--user-data", str(tmp_path / "seed"), "--label", "tier=front")
    uid = platform.create("web", "--image", HALT, *seeded)["uid"]
    backup = tmp_path / "old.backup"
    platform.cli("bus", "backup", str(backup))
    (guest,) = host.qemu_pids(uid)
    platform.stop()

    use(platform, Path(sys.executable))  # 0.2 finds the state of 0.1
    assert "docs/howto/upgrade-from-0.1.md" in refused_up(platform)
    (platform.state_dir / "VERSION").rename(tmp_path / "VERSION")
    assert "docs/howto/upgrade-from-0.1.md" in refused_up(platform)  # its bus says it as well
    (tmp_path / "VERSION").rename(platform.state_dir / "VERSION")
    assert host.qemu_pids(uid) == [guest]

    use(platform, python_of(FIRST))
    platform.start()
    platform.delete("web")
    platform.stop()
    shutil.rmtree(platform.state_dir)
    shutil.rmtree(platform.run_dir)

    use(platform, Path(sys.executable))
    platform.start()
    restore = platform.try_cli("bus", "restore", str(backup))
    assert "of virtbus 0.1" in restore.stderr
    platform.cli("bus", "specs", str(backup), "--to", str(tmp_path / "specs"))
    file = tmp_path / "specs" / "default.web.json"
    assert file.stat().st_mode & 0o077 == 0
    made = json.loads(
        platform.cli("vm", "create", "-f", str(file), "--wait", "running", "-o", "json")
    )
    platform.uids.add(made["uid"])
    assert (made["name"], made["labels"], made["state"]) == ("web", {"tier": "front"}, "Running")
    assert made["uid"] != uid
    assert SEED in file.read_text().encode().decode("unicode_escape")
    platform.delete("web")
    platform.stop()
