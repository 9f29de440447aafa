"""Checks libvirtd, its limits, and virtlogd."""

import re

from virtbus.cli.doctor.finding import CheckResult, fail, ok, warn
from virtbus.cli.doctor.probe import first_line, is_root, needs_root, read, run, unix_answers

SOCKET = "/run/libvirt/libvirt-sock"
URI = "qemu:///system"
_DENIED = "Permission denied"
_WANTED_REQUESTS, _WANTED_WORKERS = 5, 20
_START = "systemctl start libvirtd   (without systemd: virtlogd -d; setsid tini -s -- libvirtd &)"
_INSTALL = "apt-get install libvirt-daemon-system libvirt-clients"


def libvirtd() -> CheckResult:
    """Check that libvirtd answers, and report its version."""
    why = unix_answers(SOCKET)
    if why is not None:
        if _DENIED in why and not is_root():
            return needs_root("libvirtd", f"{SOCKET}: {why}")
        installed, _ = run(("libvirtd", "--version"), 3.0)
        return fail("libvirtd", f"{SOCKET}: {why}", _INSTALL if installed == 127 else _START)
    code, text = run(("virsh", "-q", "-c", URI, "version"))
    if code == 127:
        return warn(
            "libvirtd", "answers; virsh is not installed", "apt-get install libvirt-clients"
        )
    if code != 0 and not is_root():
        return needs_root("libvirtd", first_line(text))
    if code != 0:
        return fail("libvirtd", first_line(text), _START)
    versions = dict(re.findall(r"(?m)^(Using library|Running hypervisor): (.+)$", text))
    return ok("libvirtd", "; ".join(versions.values()) or first_line(text))


def limits() -> CheckResult:
    """Check libvirtd's limits of concurrent calls. They also limit concurrent VM starts."""
    requests = _configured("max_client_requests", _WANTED_REQUESTS)
    workers = _live_workers() or _configured("max_workers", _WANTED_WORKERS)
    text = f"max_client_requests {requests}, max_workers {workers}"
    if workers < _WANTED_WORKERS or requests < _WANTED_REQUESTS:
        return warn(
            "libvirtd limits",
            f"{text}: fewer VMs start at once",
            "set max_workers = 20 and max_client_requests = 5 in /etc/libvirt/libvirtd.conf",
        )
    return ok("libvirtd limits", text)


def _live_workers() -> int | None:
    code, text = run(("virt-admin", "-q", "srv-threadpool-info", "libvirtd"), 3.0)
    found = re.search(r"maxWorkers\s*:\s*(\d+)", text)
    return int(found[1]) if code == 0 and found else None


def _configured(name: str, default: int) -> int:
    text = read("/etc/libvirt/libvirtd.conf") or ""
    found = re.findall(rf"(?m)^\s*{name}\s*=\s*(\d+)", text)
    return int(found[-1]) if found else default


def virtlogd() -> CheckResult:
    """Check that virtlogd answers. virtlogd writes console logs, even during libvirtd's restart."""
    why = unix_answers("/run/libvirt/virtlogd-sock")
    if why is None:
        return ok("virtlogd", "answers")
    if _DENIED in why and not is_root():
        return needs_root("virtlogd", why)
    return fail(
        "virtlogd",
        f"does not answer ({why}): guests cannot start",
        "systemctl start virtlogd   (without systemd: virtlogd -d)",
    )
