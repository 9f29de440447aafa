"""Lists everything on a host that a VM may leave behind, one sorted line per object.

A create followed by a delete must restore the census (I5). The module uses only the standard
library, so `tools/census` runs without the environment. The census excludes the image store, the
epoch ledger and the bus's data, which outlive VMs. It also excludes zombies, which PID 1 may
reap late, and objects whose names contain a pid or an index.
"""

import argparse
import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

STATE_PARTS = ("disks", "vms", "quarantine", "netd/vms", "images/part")
"""Folders of the state folder whose files belong to VMs or to unfinished work."""

LIBVIRT_LOGS = Path("/var/log/libvirt/qemu")

CNI_DIR = Path("/var/lib/cni")
CNI_LASTING = ("last_reserved_ip.", "lock")
"""Files that host-local keeps permanently, by the start of their names."""

NETNS_DIR = Path("/run/netns")
OUR_PROGRAMS = (
    "qemu-system-",
    "dnsmasq",
    "virtbus",
    "vmwrapper",
    "nats-server",
    "swtpm",
    "virtiofsd",
    "passt",
)


def take(
    state_dir: Path = Path("/var/lib/virtbus"),
    run_dir: Path = Path("/run/virtbus"),
    libvirt_uri: str = "qemu:///system",
) -> list[str]:
    """Return the census as seen from the caller's network namespace, sorted."""
    return sorted(
        [
            *_libvirt(libvirt_uri),
            *_netns_names(),
            *_links(),
            *_routes(),
            *_nft_rules(),
            *_ip_forward(),
            *_processes(),
            *_mounts(),
            *_files(state_dir),
            *_cni_files(),
            *(f"file {path}" for path in LIBVIRT_LOGS.glob("vb-*.log*")),
            *_sockets(run_dir),
        ]
    )


def diff(before: Sequence[str], after: Sequence[str]) -> list[str]:
    """Return `- gone` and `+ new` lines; nothing if both are equal, counting repeated lines."""
    rest = list(after)
    gone = []
    for line in before:
        if line in rest:
            rest.remove(line)
        else:
            gone.append(f"- {line}")
    return gone + [f"+ {line}" for line in rest]


def _output(*argv: str) -> str | None:
    """Return the output of a command, or None if it is missing or failed."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=30)
    except OSError:
        return None
    return done.stdout if done.returncode == 0 else None


def _libvirt(uri: str) -> Iterator[str]:
    kinds = {"domain": "list", "network": "net-list", "pool": "pool-list"}
    for kind, command in kinds.items():
        listing = _output("virsh", "-q", "-c", uri, command, "--all", "--name")
        if listing is None:
            yield f"libvirt {kind}s: no answer"
            continue
        yield from (f"libvirt {kind} {name}" for name in listing.split())


def _netns_names() -> Iterator[str]:
    if NETNS_DIR.is_dir():
        yield from (f"netns {path.name}" for path in NETNS_DIR.iterdir())


def _links() -> Iterator[str]:
    # Not from /sys/class/net: a sysfs shows the namespace that mounted it.
    for link in json.loads(_output("ip", "-j", "-d", "link", "show") or "[]"):
        kind = link.get("linkinfo", {}).get("info_kind", "")
        master = f" master {link['master']}" if "master" in link else ""
        yield f"link {link['ifname']} {kind}{master}".rstrip()


def _routes() -> Iterator[str]:
    for line in (_output("ip", "-4", "-o", "route", "show", "table", "all") or "").splitlines():
        yield f"route {line.strip()}"


def _nft_rules() -> Iterator[str]:
    """Prefix each line of the ruleset with the names of its enclosing blocks."""
    path: list[str] = []
    for line in (_output("nft", "-s", "list", "ruleset") or "").splitlines():
        text = line.strip()
        if text.endswith("{"):
            path.append(text[:-1].strip())
            yield "nft " + " / ".join(path)
        elif text == "}":
            path.pop()
        elif text:
            yield "nft " + " / ".join([*path, text])


def _ip_forward() -> Iterator[str]:
    value = Path("/proc/sys/net/ipv4/ip_forward").read_text(encoding="ascii").strip()
    yield f"ip_forward {value}"
    for six in Path("/proc/sys/net/ipv6/conf/all").glob("forwarding"):  # a kernel may lack IPv6
        yield f"ipv6 forwarding {six.read_text(encoding='ascii').strip()}"


def _is_here(folder: Path, argv: Sequence[str]) -> bool:
    """Guests run in libvirtd's network namespace; others count only in the caller's own."""
    if Path(argv[0]).name.startswith("qemu-system-"):
        return True
    try:
        return (folder / "ns/net").readlink() == Path("/proc/self/ns/net").readlink()
    except OSError:
        return False


def _processes() -> Iterator[str]:
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            argv = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
        except OSError:
            continue
        if _is_ours(argv) and _is_here(folder, argv):
            yield f"process {_short(argv)}"


def _is_ours(argv: Sequence[str]) -> bool:
    """Return True if the program, or an interpreter's script, is one of ours."""
    names = [Path(word).name for word in argv[:2]]
    module = argv[2] if argv[1:2] == ["-m"] and len(argv) > 2 else ""
    return any(name.startswith(OUR_PROGRAMS) for name in names) or module.startswith("virtbus")


def _short(argv: Sequence[str]) -> str:
    program = Path(argv[0]).name
    if program.startswith("qemu-system-") and "-name" in argv[:-1]:
        return f"{program} {argv[argv.index('-name') + 1]}"
    return " ".join([program, *argv[1:]])


def _mounts() -> Iterator[str]:
    lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    for point in (line.split()[4] for line in lines):
        # iproute2's convention makes /run/netns itself a mount, once and permanently.
        if "virtbus" in point or (point.startswith(f"{NETNS_DIR}/")):
            yield f"mount {point}"


def _files(state_dir: Path) -> Iterator[str]:
    for part in STATE_PARTS:
        yield from (f"file {path}" for path in _below(state_dir / part))


def _cni_files() -> Iterator[str]:
    for path in _below(CNI_DIR):
        if not path.name.startswith(CNI_LASTING):
            yield f"file {path}"


def _sockets(run_dir: Path) -> Iterator[str]:
    for path in _below(run_dir):
        try:
            if stat.S_ISSOCK(path.lstat().st_mode):
                yield f"socket {path}"
        except FileNotFoundError:
            continue


def _below(folder: Path) -> Iterator[Path]:
    """List every non-folder below `folder`, and each empty folder."""
    for parent, folders, files in os.walk(folder):
        yield from (Path(parent) / name for name in files)
        if not folders and not files and Path(parent) != folder:
            yield Path(parent)


def main(arguments: Sequence[str]) -> int:
    """Print the census, or with --diff FILE the changes since then; return 1 if there are any."""
    parser = argparse.ArgumentParser(
        prog="tools/census", description=(__doc__ or "").split("\n")[0]
    )
    environ = os.environ
    parser.add_argument(
        "--state-dir", type=Path, default=environ.get("VIRTBUS_STATE_DIR", "/var/lib/virtbus")
    )
    parser.add_argument(
        "--run-dir", type=Path, default=environ.get("VIRTBUS_RUN_DIR", "/run/virtbus")
    )
    parser.add_argument("--libvirt-uri", default="qemu:///system")
    parser.add_argument("--diff", type=Path, metavar="FILE", help="an earlier census")
    options = parser.parse_args(arguments)
    now = take(options.state_dir, options.run_dir, options.libvirt_uri)
    if options.diff is None:
        lines = now
    else:
        lines = diff(options.diff.read_text(encoding="utf-8").splitlines(), now)
    sys.stdout.writelines(f"{line}\n" for line in lines)
    return 1 if options.diff is not None and lines else 0
