"""A program `lvm` for tests: Debian's lvm2 on a loop device, in a kernel without device-mapper.

The commands change and read real metadata. Their activation is pretended: each logical volume gets
a loop device, whose bytes are those of an earlier owner. A fault is what a command of that name
does next: it says what lvm2 said in that case, or hangs.
"""

import json
import stat
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from services.nodeagent.tests import lvm_program
from services.nodeagent.tests.lvm_program import REAL, THIN, losetup

from virtbus.bus.runtime.pool_settings import LvmPool
from virtbus.schemas.pool import PoolKind

MIB = 1024**2
CONFIG = """
devices {{ filter=["a|^{device}$|", "r|.*|"] use_devicesfile=0 hints="none" }}
global {{ use_aio=0 activation=0 locking_dir="{home}/lock" event_activation=0 }}
backup {{ backup=0 archive=0 }}
"""
PROGRAM = """#!/bin/sh
export LVM_SYSTEM_DIR={home}/etc
case $1 in
vgs | lvs) [ -e {home}/faults/$1 ] || [ -e {home}/thin ] || exec {real} "$@" ;;
esac
exec {python} -ISs {of} {home} "$@"
"""
"""Looks are quick, as there are many; the program does the rest."""
FILE = lvm_program.__file__


@dataclass(frozen=True)
class Lvm2:
    """A volume group of its own."""

    home: Path
    group: str
    devices: str
    """`/dev`, or the folder in place of it."""

    def pool(self, **more: object) -> LvmPool:
        return LvmPool.model_validate({"kind": PoolKind.LVM, "group": self.group, **more})

    def fails(self, command: str, why: str = "", said: str = "", *, hangs_s: float = 0) -> None:
        fault = {"status": 5 if why else 0, "why": why, "said": said, "hangs_s": hangs_s}
        (self.home / "faults" / command).write_text(json.dumps(fault))

    def works(self) -> None:
        """End all faults."""
        for fault in (self.home / "faults").iterdir():
            fault.unlink()

    def commands(self) -> list[list[str]]:
        """Return the commands so far that change something."""
        lines = (self.home / "log").read_text().splitlines()
        return [words for line in lines if (words := json.loads(line))[0] not in {"lvs", "vgs"}]

    def run(self, *words: str) -> str:
        """Run a command of the operator, or of a test."""
        program = str(self.home / "bin" / "lvm")
        return subprocess.run([program, *words], check=True, capture_output=True, text=True).stdout

    def tags(self) -> dict[str, set[str]]:
        """Return the tags of all logical volumes by name."""
        found = json.loads(self.run("lvs", "--reportformat", "json", "-o", "lv_name,lv_tags"))
        rows = found["report"][0]["lv"]
        return {row["lv_name"]: set(row["lv_tags"].split(",")) - {""} for row in rows}


@contextmanager
def lvm2(
    home: Path, *, size_bytes: int = 256 * MIB, thin_bytes: int = 0, devices: Path | None = None
) -> Iterator[Lvm2]:
    """Yield a volume group, and leave nothing of it. The caller puts `home/bin` into PATH."""
    group = f"vb{uuid.uuid4().hex[:10]}"
    for name in ("bin", "dev", "etc", "faults", "files", "lock"):
        (home / name).mkdir(parents=True)
    folder = (devices or home / "dev") / group
    (home / "devices").symlink_to(folder)
    (home / "log").touch()
    with (home / "pv").open("wb") as pv:
        pv.truncate(size_bytes)
    device = losetup("--find", "--show", str(home / "pv"))
    try:
        config = CONFIG.format(device=device, home=home)
        (home / "etc" / "lvm.conf").write_text(config)
        program = home / "bin" / "lvm"
        program.write_text(PROGRAM.format(home=home, python=sys.executable, real=REAL, of=FILE))
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        made = Lvm2(home, group, str(folder.parent))
        made.run("pvcreate", device)
        made.run("vgcreate", group, device)
        folder.mkdir()  # which must not be there before
        if thin_bytes:
            made.run("lvcreate", "--name", THIN, "--size", f"{thin_bytes}b", group)
            (home / "thin").touch()
        (home / "log").write_text("")
        yield made
    finally:
        for link in folder.glob("*"):
            losetup("--detach", str(link.readlink()))
            link.unlink()
        if folder.exists():
            folder.rmdir()
        losetup("--detach", device)
