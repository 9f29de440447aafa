"""Checks of what netd needs: nftables, CNI plugins, forwarding, namespaces."""

import os
import re
import shutil
from pathlib import Path

from virtbus.cli.doctor.finding import Finding, fail, ok, warn
from virtbus.cli.doctor.probe import first_line, is_root, needs_root, read, run

CNI_DIRS = ("/usr/lib/cni", "/opt/cni/bin")
_CNI_PLUGINS = ("bridge", "host-local", "loopback")


def nftables() -> Finding:
    """The firewall that holds anti-spoofing and masquerade."""
    code, text = run(("nft", "list", "tables"))
    if code == 127:
        return fail("nftables", "nft is not installed", "apt-get install nftables")
    if code != 0:
        if not is_root():
            return needs_root("nftables", first_line(text))
        return fail("nftables", first_line(text), "modprobe nf_tables")
    return ok("nftables", f"answers; {len(text.splitlines())} table(s)")


def cni() -> Finding:
    """The plugins of networks other than the built-in one."""
    found = next((d for d in CNI_DIRS if all((Path(d) / p).exists() for p in _CNI_PLUGINS)), None)
    if found is None:
        return warn(
            "cni plugins",
            "not installed; the default network works without them",
            "apt-get install containernetworking-plugins",
        )
    return ok("cni plugins", found)


def forwarding() -> Finding:
    """Guests reach the world through the host; netd switches it on and restores it."""
    if first_line(read("/proc/sys/net/ipv4/ip_forward") or "") == "1":
        return ok("ip_forward", "on")
    if os.access("/proc/sys/net/ipv4/ip_forward", os.W_OK):
        return ok("ip_forward", "off; netd switches it on while it has networks")
    return warn(
        "ip_forward",
        "off, and it may not be changed here: guests reach only this host",
        "sysctl -w net.ipv4.ip_forward=1   (on the host)",
    )


def forward_policy() -> Finding:
    """Another firewall's `drop` for forwarded packets also drops those of guests."""
    code, text = run(("nft", "list", "ruleset"))
    if code != 0:
        return ok("forward policy", "not readable; nothing known against it")
    tables = re.split(r"(?m)^table ", text)
    pattern = re.compile(r"type filter hook forward [^;]*; policy drop;")
    owners = [part.split(" {", 1)[0] for part in tables if pattern.search(part)]
    others = [owner for owner in owners if not owner.endswith(" virtbus")]
    if not others:
        return ok("forward policy", "no other firewall drops forwarded packets")
    return warn(
        "forward policy",
        f"{', '.join(others)} drops forwarded packets (Docker does that):"
        " guests may not reach the world",
        'nft insert rule ip filter FORWARD iifname "vb*" accept',
    )


def namespaces() -> Finding:
    """/run/netns must exist, and be shared so that libvirtd sees what netd binds there."""
    path = Path("/run/netns")
    if not path.exists():
        return ok("/run/netns", "not there yet; netd makes it")
    for line in (read("/proc/self/mountinfo") or "").splitlines():
        fields = line.split()
        if len(fields) > 6 and fields[4] in {"/run/netns", "/run", "/"} and "shared:" in line:
            return ok("/run/netns", "there, and shared")
    return warn(
        "/run/netns",
        "not a shared mount: other mount namespaces do not see it; that is"
        " only a problem where libvirtd runs in one",
        "mount --bind /run/netns /run/netns && mount --make-shared /run/netns",
    )


def dnsmasq() -> Finding:
    """Only where netd is told to use it."""
    if shutil.which("dnsmasq"):
        return ok("dnsmasq", "installed (only used where netd is told to)")
    return ok("dnsmasq", "not installed; netd answers DHCP itself")
