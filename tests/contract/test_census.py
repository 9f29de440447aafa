"""The census detects everything that a VM may leave behind, and nothing else."""

import subprocess
import sys
from pathlib import Path

import pytest

CENSUS = [sys.executable, str(Path(__file__).parents[2] / "tools" / "census")]


def census(state_dir: Path, *more: str) -> subprocess.CompletedProcess[str]:
    places = ["--state-dir", str(state_dir), "--run-dir", str(state_dir / "run")]
    return subprocess.run([*CENSUS, *places, *more], capture_output=True, text=True, check=False)


@pytest.fixture
def before(tmp_path: Path) -> Path:
    (tmp_path / "state").mkdir()
    file = tmp_path / "before"
    file.write_text(census(tmp_path / "state").stdout)
    return file


def test_an_unchanged_host_has_an_empty_diff(tmp_path: Path, before: Path) -> None:
    done = census(tmp_path / "state", "--diff", str(before))
    ours = [line for line in done.stdout.splitlines() if str(tmp_path) in line]
    assert ours == []


def test_a_leftover_overlay_is_reported_as_new(tmp_path: Path, before: Path) -> None:
    disk = tmp_path / "state" / "disks" / "uid" / "root.qcow2"
    disk.parent.mkdir(parents=True)
    disk.touch()
    done = census(tmp_path / "state", "--diff", str(before))
    assert done.returncode == 1
    assert f"+ file {disk}" in done.stdout.splitlines()


def test_an_empty_folder_of_a_vm_is_reported(tmp_path: Path, before: Path) -> None:
    (tmp_path / "state" / "vms" / "uid").mkdir(parents=True)
    done = census(tmp_path / "state", "--diff", str(before))
    assert f"+ file {tmp_path / 'state' / 'vms' / 'uid'}" in done.stdout.splitlines()


def test_the_image_store_is_not_counted(tmp_path: Path, before: Path) -> None:
    image = tmp_path / "state" / "images" / "data" / "sha256"
    image.parent.mkdir(parents=True)
    image.touch()
    done = census(tmp_path / "state", "--diff", str(before))
    assert str(image) not in done.stdout


@pytest.mark.integration
def test_namespaces_links_rules_and_forwarding_are_counted(tmp_path: Path) -> None:
    script = f"""
    set -e
    run() {{ {" ".join(CENSUS)} --state-dir {tmp_path} --run-dir {tmp_path} "$@"; }}
    name=census-$$
    trap 'ip netns del "$name" 2>/dev/null || true' EXIT
    echo 0 > /proc/sys/net/ipv4/ip_forward
    run > {tmp_path}/before
    ip netns add "$name"
    ip link add census0 type bridge
    nft add table inet census
    nft 'add chain inet census c; add rule inet census c tcp dport 1 accept'
    echo 1 > /proc/sys/net/ipv4/ip_forward
    run --diff {tmp_path}/before || test $? = 1
    echo ---
    ip netns del "$name"; ip link del census0; nft delete table inet census
    echo 0 > /proc/sys/net/ipv4/ip_forward
    run --diff {tmp_path}/before | grep -E "census|forward" || true
    """
    alone = ["unshare", "--net", "bash", "-c", script]
    done = subprocess.run(alone, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found, left = done.stdout.split("---\n")
    for expected in (
        "+ netns census-",
        "+ mount /run/netns/census-",
        "+ link census0 bridge",
        "+ nft table inet census / chain c / tcp dport 1 accept",
        "- ip_forward 0",
        "+ ip_forward 1",
    ):
        assert expected in found
    assert left == ""
