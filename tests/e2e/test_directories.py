"""A guest mounts directories of its host by virtiofs, and nothing else of it."""

import json
import os
from pathlib import Path

import pytest
from tests.e2e.platform import Json, Platform, Refused, until

pytestmark = pytest.mark.e2e

SCRIPT = """#!/bin/sh
echo from-guest >/www/new && chown 1000:1000 /www/new
cp /docs/page /www/copied
touch /docs/forbidden 2>/www/error
ls /www/.. >/www/listed
echo SHARED-DONE >/dev/console
"""


def folders(platform: Platform) -> tuple[Path, Path]:
    root = platform.base / "shared"
    for name in ("www", "docs"):
        (root / name).mkdir()
    (root / "docs" / "page").write_text("of the host")
    (root / "away").symlink_to("/etc")
    return root / "www", root / "docs"


def spec(www: Path, docs: Path) -> Json:
    """Return a VM whose seed mounts both directories, and runs the script then."""
    mounts = [{"volume": "www", "path": "/www"}, {"volume": "docs", "path": "/docs"}]
    filesystems = [
        {"name": "www", "directory": str(www)},
        {"name": "docs", "directory": str(docs), "readonly": True},
    ]
    seed = {"name": "seed", "cloud_init_no_cloud": {"user_data": SCRIPT, "mounts": mounts}}
    volumes = [{"name": "root", "image": {"ref": "tiny"}}, seed]
    domain = {"memory": {"guest": "128MiB"}, "devices": {"filesystems": filesystems}}
    return {"spec": {"domain": domain, "volumes": volumes}}


def refused(platform: Platform, *argv: str) -> str:
    with pytest.raises(Refused) as caught:
        platform.cli(*argv, "-o", "json")
    return str(caught.value.error["reason"])


def test_a_guest_shares_directories_with_its_host(platform: Platform, tmp_path: Path) -> None:
    www, docs = folders(platform)
    file = tmp_path / "vm.json"
    file.write_text(json.dumps(spec(www, docs)))
    platform.create("sharing", "-f", str(file))
    until(
        lambda: "SHARED-DONE" in platform.console_log("sharing"),
        lambda: platform.console_log("sharing")[-3000:],
        within_s=120,
    )
    assert "is not mounted" not in platform.console_log("sharing")
    assert (www / "new").read_text() == "from-guest\n"
    assert os.stat(www / "new").st_uid == 1000, "the guest's root sets any owner"
    assert (www / "copied").read_text() == "of the host"
    assert "Read-only file system" in (www / "error").read_text()
    assert not (docs / "forbidden").exists()
    assert "tmp" in (www / "listed").read_text().split(), "`..` is the guest's own root"

    # it belongs to this guest, on this node, and to no snapshot
    platform.create("second", "--directory", f"www={www}", wait="")
    uid = platform.get("sharing")["uid"]
    until(lambda: f"the VM {uid} has {www}" in platform.get("second")["message"], "the reason")
    assert platform.get("second")["reason"] == "directory_refused"
    assert refused(platform, "vm", "move", "sharing", "--discard-local-disks") == "volumes_stay"
    assert refused(platform, "snapshot", "create", "s1", "--vm", "sharing") == "no_snapshots"
    assert refused(platform, "backup", "create", "sharing") == "no_snapshots"
    elsewhere = ("vm", "create", "other", "--image", "tiny", "--directory", "etc=/etc")
    assert refused(platform, *elsewhere) == "no_capacity"
    platform.create("link", "--directory", f"away={www.parent}/away", wait="")
    until(lambda: "links are not followed" in platform.get("link")["message"], "the reason")

    platform.delete("sharing", "link")
    platform.wait_state("second", "Running", within_s=120)
    platform.delete("second")
    assert (www / "new").exists(), "a delete removes no file of the directory"
