"""The test images of critest: each is a container of busybox, and a disk with a guest.

So the same image runs as a container and as a VM. A registry on loopback has them under the paths
that critest asks for.
"""

import hashlib
import io
import json
import subprocess
import tarfile
from collections.abc import Mapping
from pathlib import Path

from services.imaged.tests.registry_under_test import LAYER, MANIFEST, Registry, descriptor
from services.imaged.tests.site_under_test import Web
from tests.e2e.platform import tiny_image
from tests.kubernetes.cluster import ROOT

BUSYBOX = Path("/usr/bin/busybox")
APPLETS = (
    *("sh", "echo", "top", "sleep", "ls", "cat", "hostname", "mkdir", "seq", "sync"),
    *("httpd", "touch", "id", "grep", "ps", "test", "true", "mount", "tty", "nproc", "env"),
)
USERS = b"root:x:0:0::/:/bin/sh\nwww-data:x:33:33::/:/bin/sh\ndefault-user:x:1000:1000::/:/bin/sh\n"
GROUPS = b"root:x:0:\nwww-data:x:33:\ndefault-user:x:1000:\ngroup-in-image:x:50000:default-user\n"
STAGING = "k8s-staging-cri-tools"
WEB = {"Entrypoint": ["httpd", "-f", "-p", "80", "-h", "/www"]}
SERVE = "mkdir -p /run/www && echo welcome >/run/www/index.html && httpd -p 80 -h /run/www\n"
PGREP = """\
#!/bin/sh
for one in /proc/[0-9]*; do [ "$(cat "$one/comm" 2>/dev/null)" != "$1" ] || echo "${one##*/}"; done
"""
"""Debian's busybox has no such applet."""
BOOTED: Mapping[str, Mapping[str, object]] = {
    "e2e-test-images/busybox:1.29-2": {},
    "e2e-test-images/nginx:1.14-2": WEB,
    f"{STAGING}/hostnet-nginx-amd64:latest": {
        "Entrypoint": ["httpd", "-f", "-p", "12003", "-h", "/www"]
    },
    f"{STAGING}/test-image-predefined-group:latest": {"User": "default-user"},
}
"""Images that run; their guest serves a page on port 80."""
STORED: Mapping[str, Mapping[str, object]] = {
    "pause:3.9": {},
    f"{STAGING}/test-image-latest:latest": {},
    f"{STAGING}/test-image-tag:test": {},
    f"{STAGING}/test-image-tag:all": {},
    f"{STAGING}/test-image-user-uid:latest": {"User": "1002"},
    f"{STAGING}/test-image-user-username:latest": {"User": "www-data"},
    f"{STAGING}/test-image-user-uid-group:latest": {"User": "1003:users"},
    f"{STAGING}/test-image-user-username-group:latest": {"User": "www-data:100"},
    **{f"{STAGING}/test-image-{number}:latest": {} for number in (1, 2, 3)},
}
"""Images that are only pulled, each with a disk of its own."""
SAME = tuple(f"{STAGING}/test-image-tags:{number}" for number in (1, 2, 3))
"""Names of one image."""


def images(folder: Path) -> Registry:
    """Return all images; `folder` is for unfinished files."""
    found = Registry(Web())
    guest = served_tiny(folder)
    for name, config in BOOTED.items():
        _push(found, name, config, guest)
    for number, (name, config) in enumerate(STORED.items()):
        _push(found, name, config, _disk(number))
    for name in SAME:
        _push(found, name, {}, _disk(len(STORED)))
    return found


def served_tiny(folder: Path) -> bytes:
    """Return the guest `tiny` with a web server that starts at its boot."""
    raw, script, small = folder / "guest.raw", folder / "boot", folder / "guest.qcow2"
    _run("qemu-img", "convert", "-O", "raw", str(tiny_image()), str(raw))
    script.write_text((ROOT / "images/guest/lib/tiny/boot").read_text() + SERVE)
    program = folder / "pgrep"
    program.write_text(PGREP)
    table = json.loads(_run("sfdisk", "--json", str(raw)))["partitiontable"]
    offset = table["partitions"][-1]["start"] * 512
    for change in (
        "rm /lib/tiny/boot",
        f"write {script} /lib/tiny/boot",
        "sif /lib/tiny/boot mode 0100755",
        f"write {program} /bin/pgrep",
        "sif /bin/pgrep mode 0100755",
    ):
        _run("debugfs", "-w", "-R", change, f"{raw}?offset={offset}")
    _run("qemu-img", "convert", "-c", "-O", "qcow2", str(raw), str(small))
    return small.read_bytes()


def _run(*argv: str) -> str:
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout


def _disk(number: int) -> bytes:
    """Return a disk that differs from those of other numbers."""
    return number.to_bytes(8, "big") * (1024**2 // 8)


def _push(found: Registry, name: str, config: Mapping[str, object], disk: bytes) -> None:
    repository, _, tag = name.partition(":")
    layers = (_tree(), _layer(("disk/disk.img", disk)))
    whole = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Env": ["PATH=/bin"], "Cmd": ["sh"], **config},
        "rootfs": {"type": "layers", "diff_ids": [_digest(one) for one in layers]},
    }
    body = json.dumps(whole).encode()
    for data in (body, *layers):
        found.put(f"{repository}/blobs/{_digest(data)}", data)
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": descriptor(body, "application/vnd.oci.image.config.v1+json"),
        "layers": [descriptor(one, LAYER) for one in layers],
    }
    found.push_manifest(repository, tag, manifest, MANIFEST)


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def _tree() -> bytes:
    links = [(f"bin/{name}", "busybox") for name in APPLETS]
    users = [("etc/passwd", USERS), ("etc/group", GROUPS)]
    page = ("www/index.html", b"welcome\n")
    programs = (("bin/busybox", BUSYBOX.read_bytes()), ("bin/pgrep", PGREP.encode()))
    return _layer(*programs, *links, *users, page, ("tmp/", b""))


def _layer(*members: tuple[str, bytes | str]) -> bytes:
    """Return a layer: bytes are a file, a text is the target of a symlink."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, data in members:
            info = tarfile.TarInfo(name.rstrip("/"))
            info.mode = 0o755
            if isinstance(data, str):
                info.type, info.linkname = tarfile.SYMTYPE, data
            elif name.endswith("/"):
                info.type, info.mode = tarfile.DIRTYPE, 0o1777
            else:
                info.size = len(data)
            archive.addfile(
                info, io.BytesIO(data) if info.size and isinstance(data, bytes) else None
            )
    return out.getvalue()
