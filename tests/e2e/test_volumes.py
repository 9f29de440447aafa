"""A volume's data outlives its VM, and only a delete of the volume removes it.

Guests see each other's writes to a shared volume.
"""

import json
from functools import partial
from pathlib import Path

import pytest
from tests.e2e.login import Login
from tests.e2e.platform import POOL, Platform, Refused, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

WRITE = """#!/bin/sh
echo kept-by-one | dd of=/dev/vdb conv=fsync 2>/dev/null
echo ALL-WRITTEN > /dev/ttyS0
"""
READ = """#!/bin/sh
echo "TOLD $(cat /sys/block/vdc/size) $(head -n 1 /dev/vdc) ALL-TOLD" > /dev/ttyS0
"""


def script(folder: Path, text: str) -> str:
    path = folder / "user-data"
    path.write_text(text)
    return str(path)


def said(platform: Platform, name: str, what: str) -> str:
    until(lambda: what in platform.console_log(name), lambda: platform.console_log(name)[-2000:])
    return platform.console_log(name)


def make_pool(platform: Platform) -> Path:
    """Make the folder of the pool POOL, and wait until its node has seen it."""
    pool = platform.state_dir / "disks" / "pools" / POOL
    pool.mkdir(parents=True)
    pool.chmod(0o711)
    until(lambda: platform.pool(POOL)["state"] == "Ready", "the pool")
    return pool


def remove_pool(pool: Path) -> None:
    """Remove the folder of a pool, once nothing is in it."""
    until(lambda: not list(pool.iterdir()), "the data of the pool is removed")
    pool.rmdir()
    pool.parent.rmdir()


def test_a_guest_finds_what_the_guest_of_a_deleted_vm_wrote(
    platform: Platform, tmp_path: Path
) -> None:
    platform.cli("volume", "create", "data-1", "--size", "64MiB")
    use = ("--image", "tiny", "--memory", "128MiB", "--volume", "data-1", "--user-data")
    platform.create("one", *use, script(tmp_path, WRITE), wait="ready")
    said(platform, "one", "ALL-WRITTEN")
    for command, reason in (
        (("vm", "create", "two", *use, script(tmp_path, READ)), "volume_in_use"),
        (("volume", "delete", "data-1"), "volume_in_use"),
        (("vm", "move", "one", "--discard-local-disks"), "volumes_stay"),
    ):
        with pytest.raises(Refused) as refused:
            platform.cli(*command, "-o", "json")
        assert refused.value.error["reason"] == reason, refused.value.text
    platform.delete("one")

    volume = json.loads(platform.cli("volume", "update", "data-1", "--size", "96MiB", "-o", "json"))
    assert (volume["state"], volume["holder"]) == ("Bound", "")
    file = tmp_path / "two.json"
    two = {"image": "tiny", "memory": "128MiB", "user_data": READ}
    file.write_text(json.dumps(two | {"spec": {"run_strategy": "Halted"}}), encoding="utf-8")
    platform.create("two", "-f", str(file), wait="")
    until(lambda: platform.get("two")["state"] == "Stopped", "two is off")
    platform.cli("volume", "attach", "data-1", "two")
    platform.cli("vm", "start", "two")
    assert f"TOLD {96 * 2**20 // 512} kept-by-one ALL-TOLD" in said(platform, "two", "ALL-TOLD")
    platform.cli("vm", "stop", "two", "--grace", "0")
    until(lambda: platform.get("two")["state"] == "Stopped", "two is off again")
    platform.cli("volume", "detach", "data-1")

    (folder,) = (platform.state_dir / "disks" / "volumes").iterdir()
    assert {path.name for path in folder.iterdir()} >= {"disk.qcow2", "record.json"}
    platform.cli("volume", "delete", "data-1")  # refused by imaged while two has its link
    assert not folder.exists()
    platform.nothing_left()


def test_a_guest_finds_what_it_wrote_after_a_move_while_it_was_off(
    platform: Platform, tmp_path: Path
) -> None:
    login, pool = Login(tmp_path), make_pool(platform)
    platform.cli("volume", "create", "data-1", "--size", "64MiB")
    use = ("--image", "tiny", "--memory", "128MiB", "--volume", "data-1")
    view = platform.create("web", *use, "--ssh-key", login.public_key, wait="ready")
    login(view, "mke2fs -q /dev/vdb && mount /dev/vdb /mnt && echo kept-by-web >/mnt/note; sync")
    with pytest.raises(Refused) as refused:
        platform.cli("volume", "move", "data-1", "--pool", POOL, "-o", "json")
    assert refused.value.error["reason"] == "volume_in_use", refused.value.text
    volumes = platform.state_dir / "disks" / "volumes"
    for goal, former in ((POOL, volumes), ("local", pool)):
        platform.cli("vm", "stop", "web", "--grace", "0")
        platform.wait_state("web", "Stopped")
        told = platform.cli("volume", "move", "data-1", "--pool", goal, "-o", "json")
        moved = json.loads(told)
        assert (moved["spec"].get("pool", "local"), moved["holder_name"]) == (goal, "web")
        platform.cli("vm", "start", "web")
        (view,) = platform.wait_ready("web")
        assert login(view, "mount /dev/vdb /mnt && cat /mnt/note") == "kept-by-web\n"
        until(partial(_is_empty, former), "the former data is removed")
    platform.delete("web")
    platform.cli("volume", "delete", "data-1")
    remove_pool(pool)
    done = json.loads(platform.cli("operation", "list", "-o", "json"))["items"]
    platform.cli("operation", "delete", *(item["id"] for item in done))
    platform.nothing_left()


def test_a_guest_boots_from_a_volume_of_an_image(platform: Platform, tmp_path: Path) -> None:
    platform.cli("volume", "create", "root-1", "--size", "256MiB", "--from-image", "tiny")
    pool = make_pool(platform)
    platform.cli("volume", "create", "copy", "--from-image", "tiny", "--pool", POOL)
    assert [path.name for path in pool.glob("default.copy.*/*.qcow2")] == ["disk.qcow2"]
    moved = json.loads(platform.cli("volume", "move", "copy", "--pool", "local", "-o", "json"))
    assert moved["spec"]["pool"] == "local"
    until(lambda: not list(pool.iterdir()), "the former data is removed")
    file = tmp_path / "vm.json"
    spec = {
        "domain": {"memory": {"guest": "128MiB"}},
        "volumes": [_root("root-1"), _named("copy")],
    }
    file.write_text(json.dumps({"spec": spec}), encoding="utf-8")
    platform.create("boots", "-f", str(file), wait="ready")
    platform.delete("boots")
    platform.cli("volume", "delete", "root-1", "copy")
    remove_pool(pool)
    done = json.loads(platform.cli("operation", "list", "-o", "json"))["items"]
    platform.cli("operation", "delete", *(item["id"] for item in done))
    platform.nothing_left()


def _is_empty(folder: Path) -> bool:
    return not list(folder.glob("default.*"))


def _named(volume: str) -> dict[str, object]:
    return {"name": volume, "volume": {"name": volume}}


def _root(volume: str) -> dict[str, object]:
    return {"name": "root", "volume": {"name": volume}}


# Each guest writes its name to a block of the shared disk, and prints the other's block, both
# without a page cache. It finds the disk by its size.
SHARE = """#!/bin/sh
disk() {
    while read -r _ _ kib name; do [ "$kib" = 40960 ] && echo "$name"; done </proc/partitions
}
while sleep 0.3; do
    [ "$now" = "$(disk)" ] || { now=$(disk); echo "DISK ${now:-gone}." >/dev/ttyS0; }
    [ "$now" ] || continue
    printf %-4096s MINE-{own} | dd of=/dev/$now bs=4096 seek={own} oflag=direct 2>/dev/null
    text=$(dd if=/dev/$now bs=4096 skip={other} count=1 iflag=direct 2>/dev/null | head -c 16)
    [ "$text" = "$seen" ] || { seen=$text; echo "SEEN $seen" >/dev/ttyS0; }
done &
"""


def share(platform: Platform, own: int, other: int, folder: Path, *volume: str) -> str:
    """Make the VM number `own`, whose guest prints the block of the VM number `other`."""
    text = SHARE.replace("{own}", str(own)).replace("{other}", str(other))
    use = ("--image", "tiny", "--memory", "128MiB", "--user-data", script(folder, text))
    platform.create(f"share-{own}", *use, *volume, wait="ready")
    return f"share-{own}"


def test_guests_write_to_one_shared_volume(platform: Platform, tmp_path: Path) -> None:
    platform.cli("volume", "create", "both", "--size", "40MiB", "--access", "shared")
    one = share(platform, 1, 2, tmp_path, "--volume", "both")
    two = share(platform, 2, 1, tmp_path)
    platform.cli("volume", "attach", "both", two)
    said(platform, two, "SEEN MINE-1")
    said(platform, one, "SEEN MINE-2")
    for command, reason in (
        (("volume", "delete", "both"), "volume_in_use"),
        (("volume", "update", "both", "--size", "48MiB"), "cannot_grow"),
        (("volume", "move", "both", "--pool", POOL), "volume_shared"),
        (("snapshot", "create", "s", "--vm", one), "no_snapshots"),
        (("volume", "detach", "both"), "several_holders"),
    ):
        with pytest.raises(Refused) as refused:
            platform.cli(*command, "-o", "json")
        assert refused.value.error["reason"] == reason, refused.value.text

    platform.cli("volume", "detach", "both", two)
    said(platform, two, "DISK gone.")
    view = json.loads(platform.cli("volume", "get", "both", "-o", "json"))
    assert [holder["name"] for holder in view["holders"]] == [one]
    platform.delete(two)
    three = share(platform, 3, 1, tmp_path, "--volume", "both")  # while another guest has it
    said(platform, three, "SEEN MINE-1")
    platform.delete(one)
    platform.delete(three)
    (folder,) = (platform.state_dir / "disks" / "volumes").iterdir()
    assert {path.name for path in folder.iterdir()} == {"disk.raw", "record.json"}
    blocks = (folder / "disk.raw").read_bytes()[: 4 * 4096].split()
    assert [one.strip(b"\0") for one in blocks] == [b"MINE-1", b"MINE-2", b"MINE-3"]
    platform.cli("volume", "delete", "both")
    assert not folder.exists()
    platform.nothing_left()
