"""Checks netd's requirements: nftables, CNI plugins, forwarding, network namespaces."""

import os
import re
from pathlib import Path

from virtbus.cli.doctor.finding import CheckResult, fail, ok, unknown, warn
from virtbus.cli.doctor.probe import first_line, is_root, needs_root, read, run

CNI_DIRS = ("/usr/lib/cni", "/opt/cni/bin")
_ACCEPT_DOCKER = (
    "for way in -i -o; do iptables -I DOCKER-USER $way virtbus0 -j ACCEPT; done   (on the host)"
)
_ACCEPT = "for way in -i -o; do iptables -I FORWARD $way virtbus0 -j ACCEPT; done"
_CNI_PLUGINS = ("bridge", "host-local", "loopback")


def nftables() -> CheckResult:
    """Check that nftables works. netd needs nftables for anti-spoofing and masquerading."""
    code, text = run(("nft", "list", "tables"))
    if code == 127:
        return fail("nftables", "nft is not installed", "apt-get install nftables")
    if code != 0:
        if not is_root():
            return needs_root("nftables", first_line(text))
        return fail("nftables", first_line(text), "modprobe nf_tables")
    return ok("nftables", f"answers; {len(text.splitlines())} table(s)")


def cni() -> CheckResult:
    """Check that CNI plugins are installed. Only networks of the kind cni need them."""
    found = next((d for d in CNI_DIRS if all((Path(d) / p).exists() for p in _CNI_PLUGINS)), None)
    if found is None:
        return warn(
            "cni plugins",
            "not installed; the default network works without them",
            "apt-get install containernetworking-plugins",
        )
    return ok("cni plugins", found)


def forwarding() -> CheckResult:
    """Check that IP forwarding is on, or that netd can switch it on."""
    if first_line(read("/proc/sys/net/ipv4/ip_forward") or "") == "1":
        return ok("ip_forward", "on")
    if os.access("/proc/sys/net/ipv4/ip_forward", os.W_OK):
        return ok("ip_forward", "off; netd switches it on while it has networks")
    return warn(
        "ip_forward",
        "off, and it may not be changed here: guests reach only this host",
        "sysctl -w net.ipv4.ip_forward=1   (on the host)",
    )


def bridge_filter() -> CheckResult:
    """Check that the kernel can apply IP rules on bridges. Security groups need this."""
    if Path("/proc/sys/net/bridge").exists():
        return ok("br_netfilter", "loaded")
    return warn(
        "br_netfilter",
        "not loaded: VMs in security groups do not start here",
        "modprobe br_netfilter; sysctl net.bridge.bridge-nf-call-iptables=0",
    )


def forward_policy() -> CheckResult:
    """Check that no other firewall drops forwarded packets, such as the guests' packets."""
    code, text = run(("nft", "list", "ruleset"))
    if code != 0:
        why = first_line(text)
        return unknown("forward policy", f"cannot be read: {why}", "iptables -S FORWARD")
    dropping = _dropping(text)
    legacy, rules = run(("iptables-legacy", "-S", "FORWARD"))
    if legacy == 0 and "-P FORWARD DROP" in rules:
        dropping = [*dropping, "iptables-legacy"]
    if not dropping:
        return ok("forward policy", "no other firewall drops forwarded packets")
    return warn(
        "forward policy",
        f"{', '.join(dropping)} drops forwarded packets (Docker does that):"
        " guests can be limited to this host",
        _ACCEPT_DOCKER if "DOCKER-USER" in text + rules else _ACCEPT,
    )


def _dropping(ruleset: str) -> list[str]:
    """Return other programs' tables that drop forwarded packets, also the packets of guests."""
    pattern = re.compile(r"type filter hook forward [^;]*; policy drop;")
    return [
        part.split(" {", 1)[0]
        for part in re.split(r"(?m)^table ", ruleset)
        if pattern.search(part)
        and not part.split(" {", 1)[0].endswith(" virtbus")
        and not re.search(r'iifname "(?:virtbus0|virtbus\*)"[^\n]* accept', part)
    ]


def namespaces() -> CheckResult:
    """Check that /run/netns is a shared mount. libvirtd must see netd's namespaces there."""
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
        " only a problem if libvirtd runs in one of them",
        "mount --bind /run/netns /run/netns && mount --make-shared /run/netns",
    )
