"""A guest with a driver for each bus sees disks and media come, grow and go."""

import json
import subprocess
from pathlib import Path

import pycdlib
import pytest
from tests.e2e.platform import Platform, until

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
MIB_SECTORS = 2048
HOT = {"virtio": True, "scsi": True, "usb": False}
"""The buses with hot-plug, and whether a running guest sees a new size there."""
DRIVES = ("sata", "scsi")


def disks(platform: Platform) -> list[str]:
    """The disks that the guest has printed last, as `bus:sectors`."""
    lines = [line for line in platform.console_log("watch").splitlines() if "DISKS " in line]
    return lines[-1].partition("DISKS ")[2].partition(" .")[0].split() if lines else []


def sees(platform: Platform, disk: str, *, there: bool = True) -> None:
    until(
        lambda: (disk in disks(platform)) == there,
        lambda: f"{disk} {there}: {disks(platform)}\n{platform.console_log('watch')[-800:]}",
        within_s=300,
    )


def medium(path: Path, kib: int) -> int:
    """Write an ISO image with so much content; return its sectors."""
    content = path.with_suffix(".content")
    content.write_bytes(bytes(kib * 1024))
    iso = pycdlib.PyCdlib()
    iso.new()
    iso.add_file(str(content), "/CONTENT.;1")
    iso.write(str(path))
    iso.close()
    return path.stat().st_size // 512


def test_disks_and_media_change_under_a_guest_with_each_driver(
    platform: Platform, tmp_path: Path
) -> None:
    sources = platform.state_dir / "images" / "src"
    subprocess.run([ROOT / "images/disk-probe/build", sources / "probe.img"], check=True)
    first, other = sources / "first.iso", sources / "other.iso"
    sectors = [medium(first, 100), medium(other, 300)]
    given = [
        {"name": "root", "image": {"ref": f"file://{sources}/probe.img"}},
        {"name": "watch", "empty_disk": {"capacity": "2MiB"}},
        {"name": "stick", "empty_disk": {"capacity": "3MiB"}},
        *({"name": f"cd-{bus}", "image": {"ref": f"file://{first}"}} for bus in DRIVES),
    ]
    used = [
        {"name": "root", "boot_order": 1},
        {"name": "watch"},
        {"name": "stick", "bus": "usb"},
        *({"name": f"cd-{bus}", "bus": bus, "device": "cdrom"} for bus in DRIVES),
    ]
    spec = {
        "domain": {"memory": {"guest": "256MiB"}, "devices": {"disks": used}},
        "volumes": given,
    }
    file = tmp_path / "vm.json"
    file.write_text(json.dumps({"spec": spec}))
    platform.create("watch", "-f", str(file))
    sees(platform, f"virtio:{2 * MIB_SECTORS}")
    sees(platform, f"usb:{3 * MIB_SECTORS}")
    for bus, grows in HOT.items():
        _comes_and_goes(platform, bus, grows=grows)
    for bus in DRIVES:
        sees(platform, f"{bus}:{sectors[0]}")
        platform.cli("vm", "insert", "watch", f"cd-{bus}", f"file://{other}")
        sees(platform, f"{bus}:{sectors[1]}")
        sees(platform, f"{bus}:{sectors[0]}", there=False)
    platform.delete("watch")
    platform.nothing_left()


def _comes_and_goes(platform: Platform, bus: str, *, grows: bool) -> None:
    name = f"on-{bus}"
    platform.cli("volume", "create", name, "--size", "5MiB")
    platform.cli("volume", "attach", name, "watch", "--bus", bus)
    sees(platform, f"{bus}:{5 * MIB_SECTORS}")
    if grows:
        platform.cli("volume", "update", name, "--size", "7MiB")
        sees(platform, f"{bus}:{7 * MIB_SECTORS}")
    platform.cli("volume", "detach", name)
    for mib in (5, 7):
        sees(platform, f"{bus}:{mib * MIB_SECTORS}", there=False)
    platform.cli("volume", "delete", name)
