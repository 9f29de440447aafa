"""A reader of NBD has one instant of a guest that writes, and what changed since the last one."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.platform import Platform, Refused, until
from tests.e2e.test_live_snapshots import starts, writing, written

from virtbus.bus.runtime.ids import uuid7

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(900)]

DISKS = ("root", "data-1", "data-2")
READ = """
set -e
cd "$1"
for disk in root data-1 data-2; do
    qemu-img convert -O raw "nbd+unix:///$disk?socket=$VIRTBUS_NBD_SOCKET" $disk.raw
    if [ "$2" = changes ]; then
        at=server.type=unix,server.path=$VIRTBUS_NBD_SOCKET,export=$disk
        qemu-img map --output=json --image-opts \\
            driver=nbd,$at,x-dirty-bitmap=qemu:dirty-bitmap:changes >$disk.map
    fi
done
"""


def read(platform: Platform, into: Path, *, since: str = "") -> str:
    """Read all disks of the VM `web` to a folder; return the id of the reading."""
    into.mkdir()
    id_, more = uuid7(), (("--since", since) if since else ())
    told = (str(into), "changes" if since else "all")
    command = ("sh", "-c", READ, "read", *told)
    platform.cli("backup", "serve", "web", "--id", id_, *more, "--", *command)
    return id_


def number(folder: Path, disk: str) -> int:
    """Return the number that the guest had on a disk."""
    with (folder / f"{disk}.raw").open("rb") as file:
        return int(file.read(8))


def changes(folder: Path, disk: str) -> list[tuple[int, int]]:
    """Return the extents that were written since the reading before.

    QEMU shows the state "dirty" as the absence of data.
    """
    found = json.loads((folder / f"{disk}.map").read_text())
    return [(one["start"], one["length"]) for one in found if not one["data"]]


def rebuilt(before: Path, after: Path, disk: str) -> int:
    """Bring a disk of the reading before to the later one by its changes; return their bytes."""
    done = 0
    with (before / f"{disk}.raw").open("r+b") as old, (after / f"{disk}.raw").open("rb") as new:
        for start, length in changes(after, disk):
            new.seek(start)
            old.seek(start)
            old.write(new.read(length))
            done += length
    return done


def ended(platform: Platform, id_: str) -> dict[str, Any]:
    def seen() -> dict[str, Any]:
        view = json.loads(platform.cli("operation", "get", id_, "-o", "json"))
        return view if view["phase"] not in {"Accepted", "Running"} else {}

    view: dict[str, Any] = until(seen, "the reading ends")
    return view


def test_a_reader_rebuilds_the_disks_of_a_guest_from_what_was_written(
    platform: Platform, tmp_path: Path
) -> None:
    writing(platform, tmp_path)
    one, two = tmp_path / "one", tmp_path / "two"
    low = written(platform)
    first = read(platform, one)
    assert low <= number(one, "data-2") <= written(platform) + 1
    assert number(one, "data-1") - number(one, "data-2") in {0, 1}
    taken = written(platform)
    until(lambda: written(platform) > taken + 2, "the guest writes on")

    second = read(platform, two, since=first)
    assert number(two, "data-2") > number(one, "data-2")
    for disk in DISKS:
        size = (two / f"{disk}.raw").stat().st_size
        assert rebuilt(one, two, disk) < size / 4
        assert (one / f"{disk}.raw").read_bytes() == (two / f"{disk}.raw").read_bytes()
    with pytest.raises(Refused) as refused:
        read(platform, tmp_path / "three", since=first)
    assert refused.value.error == {} or "no_parent" in refused.value.text

    # the rebuilt disks boot
    platform.cli("image", "upload", str(one / "root.raw"), "--name", "read/root")
    for disk in DISKS[1:]:
        platform.cli("volume", "create", f"new-{disk}", "--from-file", str(one / f"{disk}.raw"))
    use = ("--volume", "new-data-1", "--volume", "new-data-2")
    platform.create("web2", "--image", "read/root", "--memory", "128MiB", *use)
    log = lambda: platform.console_log("web2")[-2000:]  # noqa: E731
    found = until(lambda: starts(platform, "web2"), log, within_s=150)
    assert next(iter(found.values())) == (number(two, "data-1"), number(two, "data-2"))

    nothing_is_served(platform)
    assert (
        json.loads(platform.cli("operation", "get", second, "-o", "json"))["phase"] == "Succeeded"
    )
    platform.delete("web", "web2")
    volumes = json.loads(platform.cli("volume", "list", "-o", "json"))["items"]
    platform.cli("volume", "delete", *(item["name"] for item in volumes))
    platform.cli("image", "delete", "read/root")
    removed(platform)


def test_a_reading_that_does_not_finish_ends_without_a_trace(
    platform: Platform, tmp_path: Path
) -> None:
    platform.create("web", "--image", "tiny", "--memory", "128MiB", wait="ready")
    interrupts = {"interrupt": signal.SIGINT, "end": signal.SIGTERM}
    for how in ("time", *interrupts, "failure"):
        id_ = uuid7()
        if how in interrupts:
            socket = tmp_path / "nbd.sock"
            reading = platform.start_cli(
                "backup", "serve", "web", "--id", id_, "--socket", str(socket)
            )
            until(socket.exists, "it is served")
            reading.send_signal(interrupts[how])
            reading.communicate(timeout=60)
            assert not socket.exists()
        else:
            more = ("--for", "3s", "--", "sleep", "8") if how == "time" else ("--", "false")
            with pytest.raises(Refused):
                platform.cli("backup", "serve", "web", "--id", id_, *more)
        view = ended(platform, id_)
        phase = "Failed" if how == "time" else "Cancelled"
        assert view["phase"] == phase, view
        if how == "time":
            assert view["error"]["reason"] == "read_timeout"
        nothing_is_served(platform)
    platform.cli("snapshot", "create", "s", "--vm", "web")  # the guest's job is free
    platform.cli("snapshot", "delete", "s")
    platform.delete("web")
    layers = platform.state_dir / "disks" / "layers"
    until(lambda: not list(layers.glob("*")), "layers that nothing needs are removed", within_s=120)
    removed(platform)


def nothing_is_served(platform: Platform) -> None:
    """No socket, file or name of a reading is left."""
    uid = platform.get("web")["uid"]
    left = [platform.run_dir / "vms" / uid / "nbd", platform.state_dir / "disks" / "backups"]
    assert not [path for path in left if path.exists()]
    assert not list((platform.state_dir / "vms" / uid).glob("backup-*"))


def removed(platform: Platform) -> None:
    done = json.loads(platform.cli("operation", "list", "-o", "json"))["items"]
    platform.cli("operation", "delete", *(item["id"] for item in done))
    platform.nothing_left()
