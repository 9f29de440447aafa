"""A guest finds what a snapshot had, and a second restore brings back what the first replaced."""

import json
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
echo "START $own $volume DONE" >/dev/ttyS0
END
chmod 755 /lib/tiny/count
echo '::once:/lib/tiny/count' >>/etc/inittab
sync
/lib/tiny/count
"""
"""The guest counts its starts on its own disk and on its volume."""


def started(platform: Platform, number: int) -> None:
    said = f"START {number} {number} DONE"
    before = platform.console_log("web").count(said)
    platform.cli("vm", "start", "web", "--wait")
    until(
        lambda: platform.console_log("web").count(said) > before,
        lambda: platform.console_log("web")[-2000:],
    )
    platform.cli("vm", "stop", "web", "--grace", "0", "--wait")


def test_the_disks_of_a_vm_are_restored_and_brought_back(
    platform: Platform, tmp_path: Path
) -> None:
    user_data = tmp_path / "user-data"
    user_data.write_text(COUNT)
    platform.cli("volume", "create", "data-1", "--size", "64MiB")
    use = ("--image", "tiny", "--memory", "128MiB", "--volume", "data-1")
    platform.create("web", *use, "--user-data", str(user_data), wait="ready")
    until(lambda: "START 1 1 DONE" in platform.console_log("web"), "the guest wrote")
    with pytest.raises(Refused) as refused:
        platform.cli("snapshot", "create", "one", "--vm", "web", "-o", "json")
    assert refused.value.error["reason"] == "vm_runs"
    platform.cli("vm", "stop", "web", "--grace", "0", "--wait")

    taken = json.loads(platform.cli("snapshot", "create", "one", "--vm", "web", "-o", "json"))
    assert (taken["state"], taken["resource"]) == ("Ready", "vm")
    started(platform, 2)
    started(platform, 3)
    kept = json.loads(platform.cli("snapshot", "restore", "one", "-o", "json"))
    assert (kept["state"], kept["replaced_by"]) == ("Ready", "one")
    started(platform, 2)
    platform.cli("snapshot", "restore", kept["name"], "--keep", "two")
    started(platform, 4)

    platform.cli("snapshot", "create", "alone", "--volume", "data-1", "--protected")
    with pytest.raises(Refused) as refused:
        platform.cli("snapshot", "delete", "alone", "-o", "json")
    assert refused.value.error["reason"] == "protected"
    platform.cli("snapshot", "update", "alone", "--no-protected")
    platform.delete("web")
    platform.cli("volume", "delete", "data-1")
    items = json.loads(platform.cli("snapshot", "list", "-o", "json"))["items"]
    names = [item["name"] for item in items]
    assert sorted(names) == sorted(["one", kept["name"], "two", "alone"])
    platform.cli("snapshot", "delete", *names)
    assert not (platform.state_dir / "disks" / "snapshots").exists()
    platform.nothing_left()
