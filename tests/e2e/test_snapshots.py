"""A guest finds what a snapshot had, and a second restore brings back what the first replaced."""

import json
import re
from pathlib import Path

import pytest
from tests.e2e.platform import Platform, Refused, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

COUNT = """#!/bin/sh
cat >/lib/tiny/count <<'END'
#!/bin/sh
own=$(($(cat /count 2>/dev/null || echo 0) + 1))
echo $own >/count
sync
volume=$(dd if=/dev/vdb bs=8 count=1 2>/dev/null | tr -dc 0-9)
volume=$((${volume:-0} + 1))
printf '%-8s' $volume | dd of=/dev/vdb conv=fsync 2>/dev/null
echo "START $(cat /proc/sys/kernel/random/boot_id) $own $volume DONE" >/dev/ttyS0
END
chmod 755 /lib/tiny/count
echo '::once:/lib/tiny/count' >>/etc/inittab
sync
/lib/tiny/count
"""
"""The guest counts its starts on its own disk and on its volume."""


def starts(platform: Platform, vm: str) -> dict[str, str]:
    """Return the counts in the guest's console, by the id of its boot."""
    return dict(re.findall(r"START (\S+) (\d+ \d+) DONE", platform.console_log(vm)))


def started(platform: Platform, number: int, vm: str = "web") -> None:
    """Start the guest, which reports the same count of both disks, and end it."""
    before = starts(platform, vm).keys()
    platform.cli("vm", "start", vm, "--wait")
    until(lambda: starts(platform, vm).keys() - before, lambda: platform.console_log(vm)[-2000:])
    new = [count for boot, count in starts(platform, vm).items() if boot not in before]
    assert new == [f"{number} {number}"]
    platform.cli("vm", "stop", vm, "--grace", "0", "--wait")


def test_the_disks_of_a_vm_are_restored_and_brought_back(
    platform: Platform, tmp_path: Path
) -> None:
    user_data = tmp_path / "user-data"
    user_data.write_text(COUNT)
    platform.cli("volume", "create", "data-1", "--size", "64MiB")
    use = ("--image", "tiny", "--memory", "128MiB", "--volume", "data-1")
    platform.create("web", *use, "--user-data", str(user_data), wait="ready")
    until(lambda: "1 1" in starts(platform, "web").values(), "the guest wrote")
    platform.cli("vm", "stop", "web", "--grace", "0", "--wait")

    taken = json.loads(platform.cli("snapshot", "create", "one", "--vm", "web", "-o", "json"))
    assert (taken["state"], taken["resource"]) == ("Ready", "vm")
    started(platform, 2)
    kept = json.loads(platform.cli("snapshot", "restore", "one", "-o", "json"))
    assert (kept["state"], kept["replaced_by"]) == ("Ready", "one")
    started(platform, 2)
    platform.cli("snapshot", "restore", kept["name"], "--keep", "two")
    started(platform, 3)

    file = tmp_path / "vm.json"
    other = {"image": "tiny", "memory": "128MiB", "spec": {"run_strategy": "Halted"}}
    file.write_text(json.dumps(other), encoding="utf-8")
    platform.cli("volume", "create", "data-2", "--size", "64MiB")
    platform.create("web2", "-f", str(file), "--volume", "data-2=data-1", wait="")
    until(lambda: platform.get("web2")["state"] == "Stopped", "web2 is off")
    platform.cli("snapshot", "restore", "one", "--to", "web2", "--keep", "empty")
    started(platform, 2, "web2")
    assert platform.get("web2")["uid"] != platform.get("web")["uid"]

    platform.cli("snapshot", "create", "alone", "--volume", "data-1", "--protected")
    with pytest.raises(Refused) as refused:
        platform.cli("snapshot", "delete", "alone", "-o", "json")
    assert refused.value.error["reason"] == "protected"
    platform.cli("snapshot", "update", "alone", "--no-protected")
    platform.delete("web", "web2")
    platform.cli("volume", "delete", "data-1", "data-2")
    items = json.loads(platform.cli("snapshot", "list", "-o", "json"))["items"]
    names = [item["name"] for item in items]
    assert sorted(names) == sorted(["one", kept["name"], "two", "empty", "alone"])
    platform.cli("snapshot", "delete", *names)
    assert not (platform.state_dir / "disks" / "snapshots").exists()
    done = json.loads(platform.cli("operation", "list", "-o", "json"))["items"]
    assert [item["kind"] for item in done] == ["snapshot", *["restore"] * 3, "snapshot"]
    platform.cli("operation", "delete", *(item["id"] for item in done))
    platform.nothing_left()
