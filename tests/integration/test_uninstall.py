"""`deploy/uninstall --purge` on a host of its own: it never removes data of VMs."""

import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

SCRIPT = Path(__file__).parents[2] / "deploy" / "uninstall"
FOLDERS = {
    "vms": "one",
    "disks/quarantine": "one",
    "disks/volumes": "one",
    "disks/pools/fast": "default.one.0",
    "disks/snapshots": "one",
}
"""The folders of data, each with the name of an entry."""
_HIDDEN = "/var/lib /etc /opt /run /usr/local /var/cache"
"""Folders that the script changes; each is an empty file system in the script's namespace."""


def uninstalled(folder: str, name: str = "one", *before: str) -> "subprocess.CompletedProcess[str]":
    """Run the script on a host with an entry in `folder`; it prints `left` if that is there."""
    entry = f"/var/lib/virtbus/{folder}/{name}"
    commands = (
        f"for each in {_HIDDEN}; do mkdir -p $each; mount -t tmpfs none $each; done",
        *before,
        f"mkdir -p {entry}",
        "bash -s -- --purge; code=$?",
        f"[ ! -d {entry} ] || echo left",
        "exit $code",
    )
    return subprocess.run(
        ["unshare", "--mount", "bash", "-c", "; ".join(commands)],
        input=SCRIPT.read_text(encoding="utf-8"),
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_purge_of_the_host_is_refused_while_there_is_data(folder: str) -> None:
    done = uninstalled(folder, FOLDERS[folder])
    assert done.returncode == 1, done.stderr
    assert "one" in done.stderr
    assert done.stdout.splitlines()[-1:] == ["left"]


def test_a_purge_of_the_host_empties_no_file_system_that_is_mounted_in_its_state() -> None:
    place = "/var/lib/virtbus/disks/pools/fast"
    done = uninstalled("disks/pools/fast", "other", f"mkdir -p {place}; mount -t tmpfs x {place}")
    assert done.returncode == 1, done.stderr
    assert place in done.stderr
    assert done.stdout.splitlines()[-1:] == ["left"]


def test_a_purge_of_the_host_removes_its_exports() -> None:
    done = uninstalled("disks/exports")
    assert done.returncode == 0, done.stderr
    assert "left" not in done.stdout


def test_a_purge_of_the_host_leaves_backups_elsewhere() -> None:
    backup = "/var/cache/backups/one"
    mounts = (f"mkdir -p {each}; mount -t tmpfs none {each}" for each in _HIDDEN.split())
    commands = (*mounts, f"mkdir -p {backup}", f"bash -s -- --purge && ls -d {backup}")
    done = subprocess.run(
        ["unshare", "--mount", "bash", "-c", "; ".join(commands)],
        input=SCRIPT.read_text(encoding="utf-8"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1:] == [backup]
