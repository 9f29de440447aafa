"""Checks the host itself: user, Python, disk space, quarantine, cgroups, clock, PID 1."""

import os
import shutil
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from virtbus.cli import units
from virtbus.cli.doctor.finding import CheckResult, fail, ok, warn
from virtbus.cli.doctor.probe import first_line, read, run

_LOW_BYTES = 4 * 1024**3
_REAPERS = ("systemd", "init", "tini", "dumb-init", "s6-svscan", "runit")


def root() -> CheckResult:
    """Check that doctor runs as root. netd and libvirt's system mode need root."""
    if os.geteuid() == 0:
        return ok("root", "runs as root")
    return fail("root", "a real node needs root", "sudo virtbus up   (or: virtbus up --simulate)")


def python() -> CheckResult:
    """Report this Python's version, and check that vmwrapper's interpreter exists."""
    version = ".".join(map(str, sys.version_info[:3]))
    if not Path("/usr/bin/python3").exists():
        return fail(
            "python", f"{version}, but no /usr/bin/python3 for vmwrapper", "apt-get install python3"
        )
    return ok("python", f"{version}; vmwrapper uses /usr/bin/python3")


def disk(state_dir: Path) -> CheckResult:
    """Check disk space for images and overlays."""
    there = next(path for path in (state_dir, *state_dir.parents) if path.exists())
    usage = shutil.disk_usage(there)
    text = f"{units.size(usage.free)} of {units.size(usage.total)} free for {state_dir}"
    if usage.free < _LOW_BYTES:
        return warn("disk", text, f"free space there, or: virtbus up --data DIR; see df -h {there}")
    return ok("disk", text)


def _used_bytes(files: Iterable[Path]) -> list[int]:
    """Return the disk space of each file. Services may remove files meanwhile."""
    found = []
    for file in files:
        with suppress(FileNotFoundError):
            found.append(file.lstat().st_blocks * 512)
    return found


def images(state_dir: Path) -> CheckResult:
    """Report the disk space of images and partial downloads."""
    store = state_dir / "images"
    try:
        sizes = {folder: _used_bytes((store / folder).iterdir()) for folder in ("data", "part")}
    except FileNotFoundError:
        return ok("images", "none")
    except PermissionError:
        return ok("images", "cannot be read by this user")
    text = f"{len(sizes['data'])} in {store}, {units.size(sum(sizes['data']))}"
    if sizes["part"]:
        text += f"; partial downloads, {units.size(sum(sizes['part']))}"
    return ok("images", f"{text}; imaged's setting quota_bytes limits both")


def quarantine(state_dir: Path) -> CheckResult:
    """Report the disks in quarantine. They use space until a person adopts or purges them."""
    folder = state_dir / "disks" / "quarantine"
    entries, size = [], 0
    try:
        with suppress(FileNotFoundError):
            entries = [one for one in folder.iterdir() if one.is_dir()]
        for entry in entries:
            with suppress(FileNotFoundError):  # it was purged
                size += sum(_used_bytes(entry.iterdir()))
    except PermissionError:
        return ok("quarantine", "cannot be read by this user")
    if not entries:
        return ok("quarantine", "empty")
    what = f"{len(entries)} VM(s) have disks there without a record, {units.size(size)}"
    return warn("quarantine", what, "virtbus node quarantine list NODE; then adopt or purge")


def cgroups() -> CheckResult:
    """Check that cgroups are mounted. netd identifies a vmwrapper process by its cgroup."""
    if Path("/sys/fs/cgroup/cgroup.controllers").exists():
        return ok("cgroups", "version 2")
    if Path("/sys/fs/cgroup/memory").exists() or Path("/sys/fs/cgroup/cpu").exists():
        return ok("cgroups", "version 1")
    return warn(
        "cgroups",
        "not mounted: VMs run without resource control",
        "mount -t cgroup2 none /sys/fs/cgroup",
    )


def clock() -> CheckResult:
    """Check for a time service. `virtbus status` shows an alarm if clocks differ by over 2 s."""
    code, text = run(("timedatectl", "show", "-p", "NTPSynchronized", "--value"), 3.0)
    if code == 0 and text == "yes":
        return ok("clock", "synchronized")
    if any(shutil.which(daemon) for daemon in ("chronyd", "ntpd", "timesyncd")):
        return ok("clock", "a time service is installed; systemd does not report on it")
    return warn(
        "clock",
        "no time service is seen: hosts may drift apart (an alarm beyond 2 s)",
        "apt-get install chrony   (one host alone does not need it)",
    )


def reaper() -> CheckResult:
    """Check that PID 1 or libvirtd's parent reaps ended guests at once. libvirt waits for this."""
    name = first_line(read("/proc/1/comm") or "")
    if name in _REAPERS or _libvirtd_parent() in _REAPERS:
        return ok("pid 1", f"{name}; ended guests are reaped at once")
    return warn(
        "pid 1",
        f"{name} may reap late: each stop and delete then takes a second or more",
        "run libvirtd below a reaper: tini -s -- libvirtd",
    )


def _libvirtd_parent() -> str:
    pid = first_line(read("/run/libvirtd.pid") or read("/run/libvirt/libvirtd.pid") or "")
    stat = read(f"/proc/{pid}/stat") if pid.isdigit() else None
    if not stat:
        return ""
    parent = stat.rpartition(")")[2].split()[1]
    return first_line(read(f"/proc/{parent}/comm") or "")
