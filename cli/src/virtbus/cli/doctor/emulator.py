"""Checks QEMU, KVM, image conversion, and the vmwrapper program that libvirt runs."""

import ctypes
import errno
import fcntl
import os
import platform
import shutil
import stat
from pathlib import Path

from virtbus.cli.doctor.finding import CheckResult, fail, ok, warn
from virtbus.cli.doctor.probe import first_line, run

WRAPPER = Path("/usr/local/libexec/virtbus/vmwrapper")
KVM = "/dev/kvm"
_LANDLOCK_CREATE_RULESET = 444
_KVM_GET_API_VERSION, _KVM_CREATE_VM, _KVM_API = 0xAE00, 0xAE01, 12


def qemu() -> CheckResult:
    """Check that QEMU is installed, and report its version."""
    code, text = run(("qemu-system-x86_64", "--version"))
    if code != 0:
        return fail("qemu", first_line(text), "apt-get install qemu-system-x86 qemu-utils")
    return ok("qemu", first_line(text))


def kvm() -> CheckResult:
    """Check KVM by creating a VM, because /dev/kvm may exist without working."""
    try:
        mode = Path(KVM).stat().st_mode
    except FileNotFoundError:
        return warn(
            "kvm",
            "no /dev/kvm: VMs run emulated (TCG), about ten times slower",
            "modprobe kvm_intel || modprobe kvm_amd   (or enable it in the firmware)",
        )
    shown = f"mode {stat.S_IMODE(mode):04o}"
    try:
        version = _kvm_answers()
    except OSError as error:
        if error.errno in {errno.EACCES, errno.EPERM}:
            return warn(
                "kvm",
                f"/dev/kvm ({shown}) may not be opened",
                "usermod -aG kvm $USER, then log in again",
            )
        return warn(
            "kvm", f"/dev/kvm is there but does not work ({error.strerror}): VMs run by TCG"
        )
    if version != _KVM_API:
        return warn("kvm", f"/dev/kvm speaks version {version}, not {_KVM_API}: VMs run by TCG")
    return ok(
        "kvm",
        f"makes VMs ({shown}); the nodeagent tests with a guest if they run:"
        " `virtbus node list`, ACCELERATORS",
    )


def _kvm_answers() -> int:
    """Create an empty VM in KVM; return KVM's API version. Raises OSError if KVM fails."""
    descriptor = os.open(KVM, os.O_RDWR | os.O_CLOEXEC)
    try:
        version = fcntl.ioctl(descriptor, _KVM_GET_API_VERSION, 0)
        os.close(fcntl.ioctl(descriptor, _KVM_CREATE_VM, 0))
    finally:
        os.close(descriptor)
    return int(version)


def conversion() -> CheckResult:
    """Check for qemu-img and the kernel's Landlock, by which imaged converts images."""
    name = "image conversion"
    if shutil.which("qemu-img") is None:
        return warn(name, "qemu-img is missing", "apt-get install qemu-utils")
    version = ctypes.CDLL(None).syscall(_LANDLOCK_CREATE_RULESET, None, 0, 1)
    if version < 1 or platform.machine() != "x86_64":
        return warn(
            name,
            "no Landlock: only qcow2, raw and ISO images are accepted, no vmdk, vdi, vhd or vhdx",
            "boot with lsm=landlock,... (Debian's kernel has it), on x86_64",
        )
    return ok(name, f"in a sandbox of Landlock, version {version}")


def wrapper() -> CheckResult:
    """Check that vmwrapper belongs to root, and that QEMU's user can reach and execute it."""
    if not WRAPPER.exists():
        return warn("vmwrapper", f"{WRAPPER} is not installed; netd installs it when it starts")
    for path in (WRAPPER, *WRAPPER.parents):
        status = path.stat()
        if path == WRAPPER and (status.st_uid != 0 or not status.st_mode & stat.S_IXOTH):
            return fail(
                "vmwrapper",
                f"{path} must be root's and executable for all",
                f"chown root: {path} && chmod 0755 {path}",
            )
        if path != WRAPPER and not status.st_mode & stat.S_IXOTH:
            return fail(
                "vmwrapper", f"{path} cannot be entered by QEMU's user", f"chmod o+x {path}"
            )
    return ok("vmwrapper", str(WRAPPER))
