"""The full guest on each disk bus: what it finds there, and every verb that works on the bus."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pycdlib
import pytest
from tests.e2e import host
from tests.e2e.login import Login
from tests.e2e.platform import Json, Platform, until
from tests.e2e.test_debian import BOOT_S, debian_image

from virtbus.schemas.disk import DiskBus
from virtbus.schemas.disk_buses import ABILITIES, Verb

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(3600)]

MIB = 2**20
NAME = "full"
SIZES_MIB = {"root": 3072, "data": 64, "fixed": 16, "blocks": 24, "later": 40}
LINKS = {
    DiskBus.VIRTIO: "virtio-{}",
    DiskBus.SATA: "ata-QEMU_HARDDISK_{}",
    DiskBus.SCSI: "scsi-0QEMU_QEMU_HARDDISK_{}",
    DiskBus.USB: "usb-QEMU_QEMU_HARDDISK_{}-0:0",
    DiskBus.NVME: "nvme-QEMU_NVMe_Ctrl_{}",
}
"""The links of docs/howto/disks.md, by the serial."""
PREFIXES = {DiskBus.VIRTIO: "vd", DiskBus.NVME: "nvme"}
LOGICAL_BYTES = {DiskBus.SATA: 512}
"""A SATA disk has only another physical block size."""
UNIT = """[Unit]
RequiresMountsFor=/srv/data
[Service]
ExecStart=/bin/sh -c 'echo served > /srv/data/served; exec sleep infinity'
[Install]
WantedBy=multi-user.target
"""
USER_DATA = f"""#cloud-config
users: [default, {{name: admin, shell: /bin/bash}}]
write_files:
  - {{path: /etc/motd.virtbus, permissions: '0640', content: of the seed}}
  - {{path: /etc/systemd/system/demo.service, content: {json.dumps(UNIT)}}}
runcmd: [[systemctl, daemon-reload], [systemctl, enable, --now, demo]]
"""


class Guest:
    """The full guest, with its root and all other disks on one bus."""

    def __init__(self, platform: Platform, bus: DiskBus, folder: Path) -> None:
        self.platform = platform
        self.bus = bus
        self._login = Login(folder, user="debian")
        self._media = _media(platform)
        shutil.copy(debian_image(), platform.state_dir / "images/src/debian.qcow2")
        file = folder / "vm.json"
        file.write_text(json.dumps({"spec": self._spec()}))
        platform.create(NAME, "-f", str(file), "--ssh-key", self._login.public_key)
        until(
            lambda: "GUEST-NICS " in platform.console_log(NAME),
            lambda: platform.console_log(NAME)[-4000:],
            within_s=BOOT_S,
        )
        self.view = platform.get(NAME)

    def can(self, verb: Verb) -> bool:
        """Return True if the table says that the verb works on this bus."""
        return not ABILITIES[self.bus][verb].refused

    def __call__(self, command: str) -> str:
        return self._login(self.view, command).strip()

    def link(self, name: str) -> str:
        """Return the stable path of a disk in the guest."""
        return f"/dev/disk/by-id/{LINKS[self.bus].format(name)}"

    def size_bytes(self, name: str) -> int:
        return int(self(f"lsblk -bndo SIZE {self.link(name)} || echo 0"))

    @property
    def xml(self) -> str:
        return host.run("virsh", "-c", "qemu:///system", "dumpxml", f"vb-{self.view['uid']}")

    def allocated_bytes(self, name: str) -> int:
        """Return the host's blocks of a disk of the VM."""
        folder = self.platform.state_dir / "vms" / self.view["uid"]
        return sum(one.stat().st_blocks * 512 for one in folder.glob(f"disk-{name}.*"))

    def insert(self, number: int) -> None:
        self.platform.cli("vm", "insert", NAME, "cd", f"file://{self._media[number]}")

    def change(self, name: str, **fields: Any) -> None:
        """Change a disk of the running VM."""
        now = self.platform.get(NAME)
        for disk in now["spec"]["domain"]["devices"]["disks"]:
            if disk["name"] == name:
                disk |= fields
        wanted = {"uid": now["uid"], "revision": now["revision"], "spec": now["spec"]}
        self.platform.ask("vm.update", wanted)

    def _spec(self) -> Json:
        seed = {
            "user_data": USER_DATA,
            "mounts": [{"volume": "data", "path": "/srv/data", "filesystem": "ext4"}],
        }
        more = {"error_policy": "stop"} if self.can(Verb.ERROR_POLICY) else {}
        disks: list[Json] = [{"name": "root", "boot_order": 1}, {"name": "data"} | more]
        if self.can(Verb.READONLY):
            disks.append({"name": "fixed", "readonly": True})
        if self.can(Verb.BLOCK_SIZE):
            sizes = {"logical_bytes": LOGICAL_BYTES.get(self.bus, 4096), "physical_bytes": 4096}
            disks.append({"name": "blocks", "block_size": sizes})
        volumes: list[Json] = [
            {"name": one["name"], "empty_disk": {"capacity": f"{SIZES_MIB[one['name']]}MiB"}}
            for one in disks[1:]
        ]
        if self.can(Verb.CDROM):
            disks.append({"name": "cd", "device": "cdrom"})
            volumes.append({"name": "cd", "image": {"ref": f"file://{self._media[0]}"}})
        threads = {"io_threads": {"policy": "shared"}} if self.can(Verb.IO_THREAD) else {}
        return {
            "domain": {
                "memory": {"guest": "512MiB"},
                "devices": {"disks": [{"bus": str(self.bus)} | one for one in disks]},
                **threads,
            },
            "volumes": [
                {"name": "root", "image": {"ref": "debian", "size": f"{SIZES_MIB['root']}MiB"}},
                *volumes,
                {"name": "seed", "cloud_init_no_cloud": seed},
            ],
        }


def _media(platform: Platform) -> list[Path]:
    """Make two images for a CD-ROM drive, with the labels MEDIUM-0 and MEDIUM-1."""
    made = []
    for number in range(2):
        iso = pycdlib.PyCdlib()
        iso.new(vol_ident=f"MEDIUM_{number}")
        made.append(platform.state_dir / "images" / "src" / f"medium-{number}.iso")
        iso.write(str(made[-1]))
        iso.close()
    return made


def _starts(guest: Guest) -> None:
    """Each disk has its name, its serial and its size."""
    prefix = PREFIXES.get(guest.bus, "sd")
    for disk in guest.view["spec"]["domain"]["devices"]["disks"]:
        name = disk["name"]
        if name == "cd":
            continue
        link = guest.link(name)
        assert guest(f"basename $(readlink -f {link})").startswith(prefix), name
        assert guest.size_bytes(name) == SIZES_MIB[name] * MIB
    assert guest("cloud-init status --wait").split() == ["status:", "done"]
    assert guest("id -un admin; sudo cat /etc/motd.virtbus") == "admin\nof the seed"
    assert guest("findmnt -no FSTYPE /srv/data") == "ext4"
    assert guest(f"readlink -f {guest.link('data')}") == guest("findmnt -no SOURCE /srv/data")
    assert guest("systemctl is-active demo; sudo cat /srv/data/served") == "active\nserved"


def _boots(guest: Guest) -> None:
    root = guest("lsblk -ndo PKNAME $(findmnt -no SOURCE /)")
    assert guest(f"basename $(readlink -f {guest.link('root')})") == root


def _reads_a_cdrom(guest: Guest) -> None:
    assert _label(guest) == "MEDIUM_0"
    device = _drive(guest)
    assert guest(f"sudo blockdev --getro {device}") == "1"


def _drive(guest: Guest) -> str:
    return guest.link("cd") if guest.bus is DiskBus.VIRTIO else "/dev/sr0"


def _label(guest: Guest) -> str:
    """Return the label of the medium; empty without a medium."""
    return guest(f"sudo dd if={_drive(guest)} bs=1 skip=32808 count=8 2>/dev/null || true")


def _cannot_write(guest: Guest) -> None:
    link = guest.link("fixed")
    assert guest(f"sudo blockdev --getro {link}") == "1"
    assert guest(f"sudo dd if=/dev/zero of={link} bs=4096 count=1 2>&1 || echo refused").endswith(
        "refused"
    )


def _shows_serials(guest: Guest) -> None:
    for name in ("root", "data"):
        shown = guest(f"udevadm info -q property --property=ID_SERIAL --value {guest.link(name)}")
        assert name in shown


def _discards(guest: Guest) -> None:
    fill = "sudo dd if=/dev/urandom of=/srv/data/fill bs=1M count=32 2>/dev/null; sync"
    guest(fill)
    full = guest.allocated_bytes("data")
    assert full > 32 * MIB
    guest("sudo rm /srv/data/fill; sync; sudo fstrim /srv/data")
    until(
        lambda: guest.allocated_bytes("data") < full - 24 * MIB,
        lambda: f"{guest.allocated_bytes('data')} of {full} bytes",
    )


def _shows_block_sizes(guest: Guest) -> None:
    logical = LOGICAL_BYTES.get(guest.bus, 4096)
    shown = guest(f"sudo blockdev --getss --getpbsz {guest.link('blocks')}")
    assert shown.split() == [str(logical), "4096"]


def _has_an_io_thread(guest: Guest) -> None:
    """A guest cannot see it; libvirt's description of the running domain has it."""
    assert "iothread='1'" in guest.xml


def _has_error_policies(guest: Guest) -> None:
    """A guest sees it only after an error; libvirt's description of the running domain has it."""
    assert "error_policy='stop'" in guest.xml


def _is_limited(guest: Guest) -> None:
    def read_s() -> float:
        command = f"dd if={guest.link('data')} of=/dev/null bs=512K count=12 iflag=direct"
        timed = f"a=$(date +%s%N); {command} 2>/dev/null; echo $(($(date +%s%N) - a))"
        return int(guest(f"sudo sh -c '{timed}'")) / 1e9

    free_s = read_s()
    limits = {"read_bytes_per_s": MIB // 2}
    guest.change("data", limits=limits)
    until(lambda: guest.platform.get(NAME)["disk_limits"].get("data") == limits, "limited")
    assert read_s() > 2 * free_s
    guest.change("data", limits=None)
    until(lambda: "data" not in guest.platform.get(NAME)["disk_limits"], "no limit")


def _plugs(guest: Guest) -> None:
    platform = guest.platform
    platform.cli("volume", "create", "later", "--size", f"{SIZES_MIB['later']}MiB")
    platform.cli("volume", "attach", "later", NAME, "--bus", str(guest.bus))
    until(lambda: guest.size_bytes("later") == SIZES_MIB["later"] * MIB, "the guest has it")
    guest(f"echo kept | sudo dd of={guest.link('later')} conv=fsync 2>/dev/null")


def _grows(guest: Guest) -> None:
    guest.platform.cli("volume", "update", "later", "--size", "48MiB")
    until(lambda: guest.size_bytes("later") == 48 * MIB, "the guest sees the new size")
    assert guest(f"sudo dd if={guest.link('later')} bs=4 count=1 2>/dev/null") == "kept"


def _unplugs(guest: Guest) -> None:
    guest.platform.cli("volume", "detach", "later")
    until(lambda: guest.size_bytes("later") == 0, "the guest has it no more")
    guest.platform.cli("volume", "delete", "later")


def _changes_media(guest: Guest) -> None:
    guest.platform.cli("vm", "eject", NAME, "cd")
    until(lambda: _label(guest) == "", "ejected")
    guest.insert(1)
    until(lambda: _label(guest) == "MEDIUM_1", "the other medium")


CHECKS: dict[Verb, Callable[[Guest], None]] = {
    Verb.START: _starts,
    Verb.BOOT: _boots,
    Verb.CDROM: _reads_a_cdrom,
    Verb.READONLY: _cannot_write,
    Verb.SERIAL: _shows_serials,
    Verb.DISCARD: _discards,
    Verb.BLOCK_SIZE: _shows_block_sizes,
    Verb.IO_THREAD: _has_an_io_thread,
    Verb.LIMITS: _is_limited,
    Verb.ERROR_POLICY: _has_error_policies,
    Verb.HOT_PLUG: _plugs,
    Verb.GROW: _grows,
    Verb.UNPLUG: _unplugs,
    Verb.MEDIA_CHANGE: _changes_media,
}
"""A check for each verb of the table, in the order in which they are made."""


@pytest.mark.parametrize("bus", DiskBus)
def test_the_full_guest_uses_every_verb_that_works_on_a_bus(
    platform: Platform, tmp_path: Path, bus: DiskBus
) -> None:
    assert set(CHECKS) == set(Verb)
    guest = Guest(platform, bus, tmp_path)
    for verb, check in CHECKS.items():
        if guest.can(verb):
            check(guest)
    told = {one["type"] for one in platform.get(NAME)["conditions"] if one["status"]}
    assert not told & {"RestartRequired", "DisksPending", "MediaChangePending"}
    platform.delete(NAME)
