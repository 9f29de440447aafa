"""The full guest on each disk bus: what it finds there, and every verb that works on the bus.

One guest of each bus has its root and all other disks there. Each test reads from inside.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pycdlib
import pytest
from tests.e2e import host
from tests.e2e.login import Login
from tests.e2e.platform import Json, Platform, until
from tests.e2e.stage import STAGE
from tests.e2e.test_debian import BOOT_S, debian_image

from virtbus.schemas.disk import DiskBus
from virtbus.schemas.disk_buses import ABILITIES, Verb

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(2400)]

MIB = 2**20
NAME = "full"
SIZES_MIB = {"root": 3072, "data": 64, "fixed": 16, "blocks": 24, "later": 40}
GROWN_MIB = 48
SERIALS = {"data": "twenty-characters-20"}
"""Serials of disks whose serial is not their name. A longer one would be cut on some buses."""
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
MOUNTS = {"/": "root", "/srv/data": "data"}
PENDING = {"RestartRequired", "DisksPending", "MediaChangePending"}
ASK_S = "60"
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
SEED: Json = {
    "user_data": USER_DATA,
    "mounts": [
        {"volume": "data", "path": "/srv/data", "filesystem": "ext4", "make_filesystem": True}
    ],
}


class Guest:
    """The full guest, with its root and all other disks on one bus."""

    def __init__(self, platform: Platform, bus: DiskBus, folder: Path) -> None:
        self.platform = platform
        self.bus = bus
        self._login = Login(folder, user="debian")
        self._media = _media(platform)
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
        return f"/dev/disk/by-id/{LINKS[self.bus].format(SERIALS.get(name, name))}"

    @property
    def drive(self) -> str:
        """The path of the CD-ROM drive in the guest."""
        return self.link("cd") if self.bus is DiskBus.VIRTIO else "/dev/sr0"

    def shows(self, name: str, column: str) -> str:
        """Return a column of lsblk; empty if the guest does not have the disk."""
        return self(f"lsblk -bndo {column} {self.link(name)} || :")

    def sees(self, name: str, size_mib: int | None) -> None:
        """Wait until the guest has the disk in this size, or does not have it."""
        wanted = str(size_mib * MIB) if size_mib else ""
        until(
            lambda: self.shows(name, "SIZE") == wanted,
            lambda: self("lsblk -bo +SERIAL"),
            within_s=120,
        )

    def mounted(self) -> dict[str, tuple[str, ...]]:
        """Return the disks' names by mount point, as its guest agent says."""
        words = ("vm", "guest", NAME, "filesystems", "--timeout", ASK_S, "-o", "json")
        told = json.loads(self.platform.cli(*words))["filesystems"]
        return {one["mountpoint"]: tuple(one.get("spec_disks", ())) for one in told}

    def refuses_writes(self, path: str) -> None:
        """Check that a write to a disk fails."""
        write = f"sudo dd if=/dev/zero of={path} bs=4096 count=1 oflag=direct 2>&1"
        said = self(f"{write} || echo refused")
        assert said.endswith("refused"), said

    @property
    def xml(self) -> str:
        return host.run("virsh", "-c", "qemu:///system", "dumpxml", f"vb-{self.view['uid']}")

    def thread_ticks(self) -> int:
        """Return the CPU time of the guest's I/O threads on the host."""
        pid = Path(f"/run/libvirt/qemu/vb-{self.view['uid']}.pid").read_text().strip()
        found = [
            (task / "stat").read_text().rpartition(")")[2].split()
            for task in Path("/proc", pid, "task").iterdir()
            if "iothread" in (task / "comm").read_text()
        ]
        assert found, "no I/O thread"
        return sum(int(words[11]) + int(words[12]) for words in found)

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

    def nothing_waits(self) -> None:
        """Wait until no change of the VM waits for the guest or for its next start."""

        def waiting() -> set[str]:
            told = self.platform.get(NAME)["conditions"]
            return PENDING & {one["type"] for one in told if one["status"]}

        until(lambda: not waiting(), lambda: str(self.platform.get(NAME)["conditions"]))

    def _spec(self) -> Json:
        more = {"error_policy": "stop"} if self.can(Verb.ERROR_POLICY) else {}
        disks: list[Json] = [
            {"name": "root", "boot_order": 1},
            {"name": "data", "serial": SERIALS["data"], **more},
        ]
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
                {"name": "seed", "cloud_init_no_cloud": SEED},
            ],
        }


def _media(platform: Platform) -> list[Path]:
    """Return two images for a CD-ROM drive, with the labels MEDIUM_0 and MEDIUM_1."""
    sources = platform.state_dir / "images/src"
    found = [sources / f"medium-{number}.iso" for number in range(2)]
    for number, path in enumerate(found):
        if not path.exists():  # the guest of another bus may have made it
            iso = pycdlib.PyCdlib()
            iso.new(vol_ident=f"MEDIUM_{number}")
            iso.write(str(path))
            iso.close()
    return found


def _label(guest: Guest) -> str:
    """Return the label of the medium; empty without a medium."""
    return guest(f"sudo dd if={guest.drive} bs=1 skip=32808 count=8 2>/dev/null || :")


def _starts(guest: Guest) -> None:
    """Each disk has its name and its size, and the guest has applied its seed."""
    prefix = PREFIXES.get(guest.bus, "sd")
    for disk in guest.view["spec"]["domain"]["devices"]["disks"]:
        name = disk["name"]
        if name not in {"cd", "seed"}:  # drives and seeds have no size of ours
            assert guest.shows(name, "NAME").startswith(prefix), name
            assert guest.shows(name, "SIZE") == str(SIZES_MIB[name] * MIB), name
    assert guest("cloud-init status --wait").split() == ["status:", "done"]
    assert guest("id -un admin; sudo cat /etc/motd.virtbus") == "admin\nof the seed"
    assert guest("findmnt -no FSTYPE /srv/data") == "ext4"
    assert guest(f"readlink -f {guest.link('data')}") == guest("findmnt -no SOURCE /srv/data")
    assert guest("systemctl is-active demo; sudo cat /srv/data/served") == "active\nserved"
    found = guest.mounted()
    assert {path: found[path] for path in MOUNTS} == {path: (n,) for path, n in MOUNTS.items()}


def _boots(guest: Guest) -> None:
    root = guest("lsblk -ndo PKNAME $(findmnt -no SOURCE /)")
    assert guest.shows("root", "NAME") == root


def _reads_a_cdrom(guest: Guest) -> None:
    assert _label(guest) == "MEDIUM_0"
    guest.refuses_writes(guest.drive)


def _cannot_write(guest: Guest) -> None:
    assert guest.shows("fixed", "RO") == "1"
    guest.refuses_writes(guest.link("fixed"))


def _shows_serials(guest: Guest) -> None:
    for name in ("root", "data"):
        assert guest.shows(name, "SERIAL") == SERIALS.get(name, name)


def _discards(guest: Guest) -> None:
    guest("sudo dd if=/dev/urandom of=/srv/data/fill bs=1M count=32 2>/dev/null; sync")
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
    """The guest's reads take CPU of the thread; the guest itself cannot see it."""
    before = guest.thread_ticks()
    read = f"sudo dd if={guest.link('data')} of=/dev/null bs=4k count=2000 iflag=direct 2>&1"

    def worked() -> bool:
        guest(read)
        return guest.thread_ticks() > before

    until(worked, "the thread works")


def _has_error_policies(guest: Guest) -> None:
    """A guest sees it only after an error; libvirt's description of the running domain has it."""
    assert "error_policy='stop'" in guest.xml


def _is_limited(guest: Guest) -> None:
    def read_s() -> float:
        command = f"dd if={guest.link('data')} of=/dev/null bs=512K count=12 iflag=direct"
        timed = f"a=$(date +%s%N); {command} 2>/dev/null; echo $(($(date +%s%N) - a))"
        return int(guest(f"sudo sh -c '{timed}'")) / 1e9

    free_s = read_s()
    limits = {"read_bytes_per_s": MIB // 4}
    guest.change("data", limits=limits)
    until(lambda: guest.platform.get(NAME)["disk_limits"].get("data") == limits, "limited")
    assert read_s() > 2 * free_s
    guest.change("data", limits=None)
    until(lambda: "data" not in guest.platform.get(NAME)["disk_limits"], "no limit")


def _plugs(guest: Guest) -> None:
    platform, link = guest.platform, guest.link("later")
    platform.cli("volume", "create", "later", "--size", f"{SIZES_MIB['later']}MiB")
    platform.cli("volume", "attach", "later", NAME, "--bus", str(guest.bus))
    guest.sees("later", SIZES_MIB["later"])
    assert guest.shows("later", "SERIAL") == "later"
    guest(f"sudo mkfs.ext4 -q {link} && sudo mount {link} /mnt && echo kept | sudo tee /mnt/file")
    assert guest.mounted()["/mnt"] == ("later",), "the detach of a mounted disk is refused by this"


def _grows(guest: Guest) -> None:
    guest.platform.cli("volume", "update", "later", "--size", f"{GROWN_MIB}MiB")
    guest.sees("later", GROWN_MIB)
    size = "df --output=size -m /mnt | tail -n 1"
    before = int(guest(size))
    guest(f"sudo resize2fs {guest.link('later')}")
    assert int(guest(size)) > before
    assert guest("cat /mnt/file") == "kept"


def _unplugs(guest: Guest) -> None:
    guest("sudo umount /mnt")
    guest.platform.cli("volume", "detach", "later")
    guest.sees("later", None)
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
"""A check for each verb, in the order in which they are made."""
WORKING = [(bus, v) for bus in DiskBus for v in CHECKS if not ABILITIES[bus][v].refused]


class Guests:
    """Holds the guest of one bus at a time, for all tests of that bus."""

    def __init__(self, folder: Path) -> None:
        self._platform = STAGE.get()
        self._pids = self._platform.pids()
        self._folder = folder
        self._bus: DiskBus | None = None
        self._guest: Guest | None = None
        shutil.copy(debian_image(), self._platform.state_dir / "images/src/debian.qcow2")

    def on(self, bus: DiskBus) -> Guest:
        """Return the guest of a bus. It boots once, even if that fails."""
        if bus is not self._bus:
            self.end()
            self._bus = bus
            folder = self._folder / bus
            folder.mkdir()
            self._guest = Guest(self._platform, bus, folder)
        assert self._guest is not None, f"the guest on {bus} has not booted"
        return self._guest

    def end(self) -> None:
        """Delete the guest; nothing is left of it."""
        self._guest = None
        self._platform.try_cli("vm", "delete", NAME, "--grace", "0")
        self._platform.try_cli("volume", "delete", "later")  # of a test that failed
        self._platform.nothing_left()
        assert self._platform.pids() == self._pids, "a service ended"


@pytest.fixture(scope="module")
def guests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guests]:
    try:
        held = Guests(tmp_path_factory.mktemp("full"))
        yield held
        held.end()
    except BaseException:
        STAGE.drop()
        raise


def test_each_verb_of_the_table_has_a_check() -> None:
    assert set(CHECKS) == set(Verb)


@pytest.mark.parametrize(("bus", "verb"), WORKING)
def test_a_verb_that_works_on_a_bus_works_in_the_full_guest(
    guests: Guests, bus: DiskBus, verb: Verb
) -> None:
    guest = guests.on(bus)
    CHECKS[verb](guest)
    guest.nothing_waits()
