"""A guest that writes all the time is frozen at one instant, and each instant can be restored."""

import json
import re
import subprocess
from functools import partial
from pathlib import Path

import pytest
from tests.e2e.platform import Platform, until

from virtbus.schemas.pool import LOCAL

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(600)]

WRITES = """#!/bin/sh
cat >/lib/tiny/writes <<'END'
#!/bin/sh
of() { dd if=$1 bs=8 count=1 2>/dev/null | tr -dc 0-9; }
put() { printf '%-8s' $2 | dd of=$1 conv=fsync 2>/dev/null; }
first=$(of /dev/vdb) second=$(of /dev/vdc) n=${second:-0}
echo "START $(cat /proc/sys/kernel/random/boot_id) ${first:-0} ${second:-0} DONE" >/dev/ttyS0
while :; do
    n=$((n + 1))
    put /dev/vdb $n
    put /dev/vdc $n
    echo "AT $n." >/dev/ttyS0
done
END
chmod 755 /lib/tiny/writes
echo '::once:/lib/tiny/writes' >>/etc/inittab
sync
/lib/tiny/writes &
"""
"""The guest writes each number to its first volume, then to its second one, each time to disk."""


def written(platform: Platform, vm: str = "web") -> int:
    """The last number that the guest has on both disks."""
    return max(map(int, re.findall(r"AT (\d+)\.", platform.console_log(vm))), default=0)


def starts(platform: Platform, vm: str) -> dict[str, tuple[int, int]]:
    """The numbers that the guest found on its disks, by the id of its boot."""
    found = re.findall(r"START (\S+) (\d+) (\d+) DONE", platform.console_log(vm))
    return {boot: (int(first), int(second)) for boot, first, second in found}


def found_by(platform: Platform, vm: str = "web") -> tuple[int, int]:
    """Start the guest, end it, and return what it found."""
    before = starts(platform, vm).keys()
    platform.cli("vm", "start", vm, "--wait")
    until(lambda: starts(platform, vm).keys() - before, lambda: platform.console_log(vm)[-2000:])
    found = starts(platform, vm)
    platform.cli("vm", "stop", vm, "--grace", "0", "--wait")
    return next(found[boot] for boot in found if boot not in before)


def writing(
    platform: Platform, tmp_path: Path, vm: str = "web", pools: tuple[str, str] = (LOCAL, LOCAL)
) -> None:
    """Create a VM whose guest writes to two volumes, in these pools."""
    user_data = tmp_path / "user-data"
    user_data.write_text(WRITES)
    for name, pool in zip(("data-1", "data-2"), pools, strict=True):
        platform.cli("volume", "create", name, "--size", "64MiB", "--pool", pool)
    use = ("--image", "tiny", "--memory", "128MiB", "--volume", "data-1", "--volume", "data-2")
    platform.create(vm, *use, "--user-data", str(user_data), wait="ready")
    until(lambda: written(platform) > 3, "the guest writes")


def clean(platform: Platform) -> None:
    """Every disk and layer is sound for qemu-img."""
    for path in sorted((platform.state_dir / "disks").glob("**/*.qcow2")):
        subprocess.run(["qemu-img", "check", "-q", str(path)], check=True)


def test_each_snapshot_of_a_running_guest_has_one_instant_of_all_its_disks(
    platform: Platform, tmp_path: Path
) -> None:
    writing(platform, tmp_path)
    bounds = {}
    for name in ("one", "two"):
        before = written(platform)
        taken = json.loads(platform.cli("snapshot", "create", name, "--vm", "web", "-o", "json"))
        bounds[name] = before, written(platform) + 1
        assert (taken["state"], taken["size_bytes"]) == ("Ready", 0)
        until(lambda: written(platform) > bounds[name][1] + 1, "the guest writes on")  # noqa: B023
    platform.cli("snapshot", "create", "alone", "--volume", "data-1")
    assert platform.get("web")["state"] == "Running"
    platform.cli("vm", "stop", "web", "--grace", "0", "--wait")
    last = written(platform)
    assert found_by(platform)[1] in {last, last + 1}
    for name, (low, high) in bounds.items():
        platform.cli("snapshot", "restore", name, "--keep", f"before-{name}")
        first, second = found_by(platform)
        assert low <= second <= high
        assert first - second in {0, 1}
    clean(platform)
    layers = platform.state_dir / "disks" / "layers"
    assert len(list(layers.glob("*.qcow2"))) == 7
    platform.delete("web")
    platform.cli("volume", "delete", "data-1", "data-2")
    names = ("one", "two", "alone", "before-one", "before-two")
    platform.cli("snapshot", "delete", *names)
    until(lambda: not list(layers.glob("*")), "layers that nothing needs are removed", within_s=120)
    done = json.loads(platform.cli("operation", "list", "-o", "json"))["items"]
    platform.cli("operation", "delete", *(item["id"] for item in done))
    platform.nothing_left()


COUNTS = """#!/bin/sh
cat >/lib/tiny/counts <<'END'
#!/bin/sh
own=$(($(cat /count 2>/dev/null || echo 0) + 1))
echo $own >/count
sync
echo "BEGIN $(hostname) $(cat /sys/class/net/eth0/address) $own DONE" >/dev/ttyS0
END
chmod 755 /lib/tiny/counts
echo '::once:/lib/tiny/counts' >>/etc/inittab
sync
/lib/tiny/counts
"""
"""The guest counts its starts on its own disk."""


def begun(platform: Platform, vm: str, count: int) -> str:
    """Wait until the guest has counted so many starts; return its MAC address.

    The first boot of another machine runs its first-boot data again, which counts as well.
    """

    def found() -> list[str]:
        starts = re.findall(r"BEGIN \S* (\S+) (\d+) DONE", platform.console_log(vm))
        return [address for address, number in starts if int(number) >= count]

    log = partial(platform.console_log, vm)
    address: str = until(found, lambda: log()[-2000:], within_s=150)[0]
    return address


def rests_on(platform: Platform, vm: str) -> str:
    """Return the file below the disk of a VM."""
    disk = platform.state_dir / "disks" / platform.get(vm)["uid"] / "root.qcow2"
    told = subprocess.run(
        ["qemu-img", "info", "-U", "--output=json", str(disk)], check=True, capture_output=True
    )
    return str(json.loads(told.stdout)["backing-filename"])


def test_a_clone_of_a_running_vm_has_its_disk_and_another_identity(
    platform: Platform, tmp_path: Path
) -> None:
    user_data = tmp_path / "user-data"
    user_data.write_text(COUNTS)
    use = ("--image", "tiny", "--memory", "128MiB")
    platform.create("web", *use, "--user-data", str(user_data), wait="ready")
    first = begun(platform, "web", 1)
    platform.cli("vm", "clone", "web", "web2")
    second = begun(platform, "web2", 2)
    assert first != second
    assert platform.get("web")["state"] == "Running"
    assert platform.get("web2")["uid"] != platform.get("web")["uid"]
    assert "/layers/" in rests_on(platform, "web")
    platform.cli("vm", "flatten", "web")  # its guest runs
    assert "/images/" in rests_on(platform, "web")
    platform.cli("volume", "create", "more", "--size", "16MiB")
    platform.cli("volume", "attach", "more", "web")
    platform.cli("snapshot", "create", "again", "--vm", "web")
    assert "/layers/" in rests_on(platform, "web")
    platform.cli("vm", "flatten", "web")
    assert "/images/" in rests_on(platform, "web")
    platform.cli("snapshot", "delete", "again")
    platform.delete("web")
    platform.cli("volume", "delete", "more")
    platform.cli("snapshot", "delete", "clone-web2")
    platform.cli("vm", "stop", "web2", "--grace", "0", "--wait")
    assert "/layers/" in rests_on(platform, "web2")
    platform.cli("vm", "flatten", "web2")
    assert "/images/" in rests_on(platform, "web2")
    platform.cli("vm", "start", "web2", "--wait")
    begun(platform, "web2", 3)
    platform.cli("vm", "clone", "web2", "web3", "--full")
    platform.delete("web2")
    layers = platform.state_dir / "disks" / "layers"
    until(lambda: not list(layers.glob("*")), "layers that nothing needs are removed", within_s=120)
    begun(platform, "web3", 4)
    platform.delete("web3")
    listed = partial(platform.cli, "volume", "list", "-o", "json")
    until(lambda: not json.loads(listed())["items"], "the volumes of a full clone go with it")
    done = json.loads(platform.cli("operation", "list", "-o", "json"))["items"]
    platform.cli("operation", "delete", *(item["id"] for item in done))
    platform.nothing_left()
