"""A running guest sees volumes come, grow and go, on each bus that it has a driver for."""

import json
from pathlib import Path

import pytest
from tests.e2e.platform import Json, Platform, Refused, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

WATCH = """#!/bin/sh
modprobe virtio_scsi 2>/dev/null
before=none
while sleep 0.3; do
    now=
    while read -r _ _ kib name; do
        case $name in [vs]d[a-z]) now="$now,$kib $name" ;; esac
    done </proc/partitions
    [ "$now" = "$before" ] || echo "DISKS $now" >/dev/ttyS0
    before=$now
done &
"""
BUSES = {"virtio": "vd", "scsi": "sd"}


def disks(platform: Platform) -> dict[str, int]:
    """The disks that the guest has printed last: KiB by name."""
    lines = [line for line in platform.console_log("hot").splitlines() if "DISKS ," in line]
    parts = lines[-1].partition("DISKS ,")[2].strip().split(",") if lines else []
    return {name: int(kib) for kib, _, name in (one.partition(" ") for one in parts)}


def sees(platform: Platform, wanted: set[tuple[str, int]]) -> None:
    """The guest has these disks besides its first ones: prefix of the name, and MiB."""

    def found() -> bool:
        there = {(name[:2], kib // 1024) for name, kib in disks(platform).items()}
        return {one for one in there if one[1] in {40, 48, 56}} == wanted

    until(found, lambda: f"{wanted}: {platform.console_log('hot')[-1500:]}")


def volume(platform: Platform, name: str) -> Json:
    view: Json = json.loads(platform.cli("volume", "get", name, "-o", "json"))
    return view


def test_volumes_are_attached_to_grown_in_and_detached_from_a_running_guest(
    platform: Platform, tmp_path: Path
) -> None:
    # tiny loads the driver of SCSI disks only for a guest with a SATA disk
    disks = [{"name": "sata", "bus": "sata"}]
    volumes = [{"name": "sata", "empty_disk": {"capacity": "8MiB"}}]
    spec = {"domain": {"devices": {"disks": disks}}, "volumes": volumes}
    wanted = {"image": "tiny", "memory": "128MiB", "user_data": WATCH, "spec": spec}
    file = tmp_path / "vm.json"
    file.write_text(json.dumps(wanted), encoding="utf-8")
    platform.create("hot", "-f", str(file), wait="ready")
    for bus, prefix in BUSES.items():
        platform.cli("volume", "create", f"on-{bus}", "--size", "40MiB")
        platform.cli("volume", "attach", f"on-{bus}", "hot", "--bus", bus)
        sees(platform, {(prefix, 40)})
        platform.cli("volume", "update", f"on-{bus}", "--size", "48MiB")
        sees(platform, {(prefix, 48)})
        with pytest.raises(Refused) as refused:
            platform.cli("volume", "delete", f"on-{bus}", "-o", "json")
        assert refused.value.error["reason"] == "volume_in_use"
        if bus == "virtio":  # SCSI needs no answer of the guest
            _detach_while_paused(platform, f"on-{bus}")
        platform.cli("volume", "detach", f"on-{bus}")
        seen = volume(platform, f"on-{bus}")
        assert (seen["state"], seen["holder"]) == ("Bound", "")
        sees(platform, set())
        platform.cli("volume", "delete", f"on-{bus}")
    told = platform.get("hot")["conditions"]
    assert not {one["type"] for one in told} & {"RestartRequired", "DisksPending"}
    platform.delete("hot")
    platform.nothing_left()


def _detach_while_paused(platform: Platform, name: str) -> None:
    """A paused guest cannot release a disk: the volume waits, says why, and goes later."""
    platform.cli("vm", "pause", "hot")
    until(lambda: platform.get("hot")["state"] == "Paused", "paused")
    platform.cli("volume", "detach", name, "--no-wait")
    until(lambda: "paused" in volume(platform, name)["message"], "the reason")
    assert volume(platform, name)["state"] == "Detaching"
    platform.cli("vm", "unpause", "hot")
