"""Each operation is struck at seeded instants: nothing partial is seen, and it ends or repeats.

KILL_POINTS kills of each operation, by KILL_SEED. A kill ends a service, libvirtd or the QEMU of
the guest.
"""

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.platform import Json, until
from tests.hosts.box import GATEWAY
from tests.hosts.fleet import STATE, Fleet
from tests.hosts.one_host import one_host
from tests.hosts.operation_strikes import (
    DAEMON,
    NO_GUEST,
    OF_GUEST,
    POINTS,
    SERVICES,
    UNKNOWN_LAYERS,
    WITHIN_S,
    FilesGuest,
    Strikes,
)

from virtbus.bus.runtime.ids import uuid7
from virtbus.schemas.layer import MAX_LAYERS

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(300 + 60 * POINTS)]

MIB = 1024**2
CHUNKS = 16
CHUNK_S = 0.05
"""The server sends an image in pieces, so that a pull takes a second."""
LOST_BACKUP = "backup_lost"
"""libvirtd died when it began a backup. The guest needs a stop, and libvirtd one more restart."""
OF_ONE_VM = MAX_LAYERS - 6
"""Snapshots of one VM, whose chain is bounded."""


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    settings = {
        "VIRTBUS_BACKUP_DIR": str(tmp_path_factory.mktemp("backups")),
        "VIRTBUS_IMAGE_ADDRESSES": f'["{GATEWAY}/32"]',
        "VIRTBUS_WRAPPER_DIR": str(STATE / "libexec"),  # libvirt knows its emulator already
        "VIRTBUS_WRAPPER": str(STATE / "libexec/vmwrapper"),
    }
    with one_host(Path(sys.executable), settings) as made:
        yield made


@contextmanager
def server_of(data: bytes) -> Iterator[str]:
    """Serve these bytes slowly at each path; yield the base of the URLs."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            begin = int(self.headers.get("Range", "bytes=0-")[6:].partition("-")[0])
            self.send_response(206 if begin else 200)
            self.send_header("Content-Length", str(len(data) - begin))
            self.send_header("ETag", '"v1"')
            if begin:
                self.send_header("Content-Range", f"bytes {begin}-{len(data) - 1}/{len(data)}")
            self.end_headers()
            step = len(data) // CHUNKS + 1
            for at in range(begin, len(data), step):
                self.wfile.write(data[at : min(at + step, len(data))])
                time.sleep(CHUNK_S)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the base class'
            del format, args

    server = ThreadingHTTPServer((GATEWAY, 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://{GATEWAY}:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def qcow2(folder: Path, *, foreign: bool) -> bytes:
    """An image with random bytes, in our format or one that has to be converted."""
    raw, made = folder / "disk.raw", folder / "disk.image"
    raw.write_bytes(os.urandom(24 * MIB))
    driver = "vmdk" if foreign else "qcow2"
    subprocess.run(
        ["qemu-img", "convert", "-f", "raw", "-O", driver, raw, made], check=True, timeout=60
    )
    return made.read_bytes()


def images_are_complete(strikes: Strikes) -> None:
    """Each file of the store has the digest that is its name."""
    for path in strikes.path("images/data").iterdir():
        assert hashlib.sha256(path.read_bytes()).hexdigest() == path.name


# --- images ----------------------------------------------------------------------------------
@pytest.mark.parametrize("what", ["pull", "convert"])
def test_a_pull_completes_whatever_dies(platform: Fleet, tmp_path: Path, what: str) -> None:
    strikes = Strikes(platform, what, SERVICES)
    with server_of(qcow2(tmp_path, foreign=what == "convert")) as base:
        for number in range(POINTS + 1):
            ref, begun_s = f"{base}/{number}", time.monotonic()

            def work(ref: str = ref) -> Json:
                return strikes.insist("image.pull", {"ref": ref})

            if number:
                _, answer = strikes.during(work)
            else:
                answer = work()
                strikes.calibrate(time.monotonic() - begun_s)
            images_are_complete(strikes)
            digest = (answer.get("images") or work()["images"])["n1"]["digest"]
            file = f"images/data/{digest.removeprefix('sha256:')}"
            strikes.check(file)
            assert not list(strikes.path("images/part").glob("*")), "a part is left"
            strikes.insist("image.delete", {"ref": ref})
            strikes.removed(file)


def test_an_upload_completes_whatever_dies(platform: Fleet, tmp_path: Path) -> None:
    strikes = Strikes(platform, "upload", SERVICES)
    file = tmp_path / "upload.qcow2"
    file.write_bytes(qcow2(tmp_path, foreign=False))
    for number in range(POINTS + 1):
        name, begun_s = f"uploaded/{number}", time.monotonic()

        def work(name: str = name) -> None:
            argv = ("image", "upload", str(file), "--name", name)
            until(lambda: platform.try_cli(*argv).returncode == 0, "it is stored", within_s=180)

        if number:
            strikes.during(work)
        else:
            work()
            strikes.calibrate(time.monotonic() - begun_s)
        images_are_complete(strikes)
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        strikes.check(f"images/data/{digest}")
        strikes.insist("image.delete", {"ref": name})
        strikes.removed(f"images/data/{digest}")


# --- guests ----------------------------------------------------------------------------------
class Guests:
    """A running guest for the next round; another one when the chain of its layers is long.

    The leader completes and deletes snapshots, and a killed controller loses its lease. So they are
    looked at once for each guest, and not in each round.
    """

    def __init__(self, strikes: Strikes, folder: Path) -> None:
        self._strikes = strikes
        self._folder = folder
        self._made = 0
        self._used = OF_ONE_VM
        self._guest: FilesGuest | None = None
        self._names: list[str] = []
        self._failed: list[str] = []

    def next(self) -> FilesGuest:
        if self._guest is None or self._used >= OF_ONE_VM:
            self.end()
            self._made, self._used = self._made + 1, 0
            self._guest = FilesGuest(self._strikes, self._folder, f"files-{self._made}")
        self._used += 1
        return self._guest

    def end(self) -> None:
        """Stop the guest, check its disks and snapshots, boot it once more, and delete it."""
        if self._guest is None:
            return
        self._guest.stop()
        self._strikes.check_all()
        self._guest.restarted()
        self._strikes.delete_snapshots(*self._names)
        self._strikes.no_snapshots(*self._failed)
        self._names, self._failed = [], []
        self._strikes.cli("vm", "delete", self._guest.name, "--grace", "0", "--wait")
        self._guest = None

    def snapshot(self, name: str) -> str:
        """Request a snapshot until one succeeds, each with a name of its own; return its name."""
        guest, strikes, tried = self._guest, self._strikes, 0
        assert guest is not None
        end_s = time.monotonic() + WITHIN_S
        while True:
            tried, uid = tried + 1, uuid7()
            one = f"{name}-{tried}"
            why = strikes.begun("snapshot.create", {"name": one, "vm": guest.name, "uid": uid})
            if not why:
                end = strikes.ended(uid)
                if end["phase"] == "Succeeded":
                    self._names.append(one)
                    assert strikes.path(f"disks/layers/{uid}.root.qcow2").exists()
                    return one
                self._failed.append(one)
                why = end["error"]["reason"]
                assert why in NO_GUEST | {UNKNOWN_LAYERS}, end
            assert time.monotonic() < end_s, f"{name}: {why}"
            if why == UNKNOWN_LAYERS:
                guest.stop()
                guest.restarted()


def struck(strikes: Strikes, guest: FilesGuest, work: Any, *, first: bool) -> Any:
    """Do the work of a round; the guest continues, or finds its files if its QEMU was killed."""
    synced, begun_s = guest.written(), time.monotonic()
    if first:
        done = work()
        strikes.calibrate(time.monotonic() - begun_s)
        return done
    target, done = strikes.during(work, guest.uid)
    if target == "qemu":
        guest.whole(synced)
    guest.continues()
    return done


def test_a_snapshot_ends_whatever_dies(platform: Fleet, tmp_path: Path) -> None:
    strikes = Strikes(platform, "snapshot", OF_GUEST)
    guests = Guests(strikes, tmp_path)
    for number in range(POINTS + 1):
        guest = guests.next()
        struck(strikes, guest, partial(guests.snapshot, f"s-{number}"), first=not number)
        strikes.nothing_staged()
    guests.end()
    nothing_left(strikes)


def test_a_clone_ends_whatever_dies(platform: Fleet, tmp_path: Path) -> None:
    strikes = Strikes(platform, "clone", OF_GUEST)
    guests = Guests(strikes, tmp_path)
    for number in range(POINTS + 1):
        guest, name, uid = guests.next(), f"c-{number}", uuid7()

        def work(name: str = name, uid: str = uid) -> None:
            origin = guests.snapshot(name)
            strikes.ready(origin)
            asked = {"name": name, "uid": uid, "image": "tiny", "memory": "128MiB"}
            strikes.insist("vm.create", asked | {"origin": origin})
            until(lambda: state(strikes, name) == "Running", "the clone runs", within_s=WITHIN_S)

        struck(strikes, guest, work, first=not number)
        strikes.nothing_staged()
        assert uid in strikes.host.emulators().values()
        strikes.cli("vm", "stop", name, "--grace", "0", "--wait")
        strikes.check(f"disks/{uid}/root.qcow2")
        strikes.cli("vm", "delete", name, "--grace", "0", "--wait")
    guests.end()
    nothing_left(strikes)


def state(strikes: Strikes, vm: str) -> str:
    return str(strikes.insist("vm.get", {"name": vm}).get("state"))


def test_a_backup_ends_whatever_dies(platform: Fleet, tmp_path: Path) -> None:
    strikes = Strikes(platform, "backup", OF_GUEST)
    guest = FilesGuest(strikes, tmp_path, "backed-up")
    for number in range(POINTS + 1):
        made: list[str] = []

        def work(made: list[str] = made) -> bool:
            id_ = uuid7()
            if strikes.begun("backup.create", {"vm": guest.name, "id": id_}):
                return False
            end = strikes.ended(id_)
            if end["phase"] == "Succeeded":
                made.append(id_)
                return True
            why = end["error"]["reason"]
            assert why in NO_GUEST | {"push_failed", LOST_BACKUP}, end["error"]
            assert strikes.gone("backup.get", {"id": id_})
            if why == LOST_BACKUP:
                guest.stop()
                strikes.restart_libvirtd()
                guest.restarted()
            return False

        if not struck(strikes, guest, work, first=not number):
            until(work, "a backup succeeds", within_s=WITHIN_S)
        strikes.nothing_staged()
        (id_,) = made
        check = uuid7()
        strikes.insist("backup.verify", {"id": id_, "operation": check})
        assert strikes.ended(check)["phase"] == "Succeeded"
        if number % 8 == 0:
            remove_backups(strikes)
    remove_backups(strikes)
    guest.stop()
    strikes.check_all()
    guest.restarted()
    strikes.cli("vm", "delete", guest.name, "--grace", "0", "--wait")
    nothing_left(strikes)


def remove_backups(strikes: Strikes) -> None:
    items = strikes.insist("backup.list", {}).get("items") or []
    for one in reversed(items):
        strikes.insist("backup.delete", {"id": one["id"]})


def test_a_restore_replaces_all_or_nothing_whatever_dies(platform: Fleet, tmp_path: Path) -> None:
    strikes = Strikes(platform, "restore", (*SERVICES, "libvirtd"))
    guest = FilesGuest(strikes, tmp_path, "restored")
    layer = uuid7()
    strikes.insist("snapshot.create", {"name": "kept", "vm": guest.name, "uid": layer})
    assert strikes.ended(layer)["phase"] == "Succeeded"
    strikes.ready("kept")
    guest.continues()
    synced, kept = guest.written(), list[str]()
    guest.stop()
    for number in range(POINTS + 1):
        uid, begun_s = uuid7(), time.monotonic()
        kept.append(f"k-{uid[-12:]}")

        def work(uid: str = uid, keep: str = kept[-1]) -> Json:
            asked = {"name": "kept", "keep_uid": uid, "keep": keep}
            strikes.insist("snapshot.restore", asked)
            return strikes.ended(uid)

        if number:
            _, end = strikes.during(work)
        else:
            end = work()
            strikes.calibrate(time.monotonic() - begun_s)
        assert end["phase"] == "Succeeded", end
        strikes.nothing_staged()
        disk = f"disks/{guest.uid}/root.qcow2"
        strikes.check(disk)
        told = strikes.host.box.run("qemu-img", "info", "--output=json", f"/var/lib/virtbus/{disk}")
        assert f"{layer}.root.qcow2" in json.loads(told)["backing-filename"]
        if number % 10 == 0:
            strikes.delete_snapshots(*kept)
            kept.clear()
            guest.started(synced=0)
            guest.stop()
    assert synced > 0
    strikes.check_all()
    strikes.delete_snapshots(*kept)
    strikes.cli("vm", "delete", guest.name, "--grace", "0", "--wait")
    strikes.delete_snapshots("kept")
    nothing_left(strikes)


def test_a_merge_keeps_each_byte_whatever_dies(platform: Fleet, tmp_path: Path) -> None:
    strikes = Strikes(platform, "merge", (*SERVICES, DAEMON))
    guest = FilesGuest(strikes, tmp_path, "merged")
    guest.stop()
    disk, kept = STATE / f"disks/{guest.uid}/root.qcow2", list[str]()
    for number in range(POINTS + 1):
        layer, name = uuid7(), f"m-{number}"
        asked = {"name": name, "vm": guest.name, "uid": layer, "layered": True}
        strikes.insist("snapshot.create", asked)
        assert strikes.ended(layer)["phase"] == "Succeeded"
        kept.append(name)

        def work() -> Json:
            id_ = uuid7()
            strikes.insist("operation.flatten", {"vm": guest.name, "id": id_})
            return strikes.ended(id_)

        begun_s = time.monotonic()
        if number:
            target, end = strikes.during(work)
            if target == DAEMON and end["phase"] == "Failed":
                assert end["error"]["reason"] == "copy_failed", end
                end = work()
        else:
            end = work()
            strikes.calibrate(time.monotonic() - begun_s)
        assert end["phase"] == "Succeeded", end.get("error")
        strikes.check(str(disk.relative_to(STATE)))
        told = strikes.host.box.run("qemu-img", "info", "--output=json", str(disk))
        assert "images/data" in json.loads(told)["backing-filename"]
        frozen = STATE / f"disks/layers/{layer}.root.qcow2"
        strikes.host.box.run("qemu-img", "compare", str(frozen), str(disk))
        if number % 10 == 0:
            strikes.delete_snapshots(*kept)
            kept.clear()
            guest.started(synced=0)
            guest.stop()
    strikes.delete_snapshots(*kept)
    guest.restarted()
    strikes.cli("vm", "delete", guest.name, "--grace", "0", "--wait")
    nothing_left(strikes)


def test_a_merge_of_a_running_guest_ends_whatever_dies(platform: Fleet, tmp_path: Path) -> None:
    strikes = Strikes(platform, "running merge", OF_GUEST)
    guests = Guests(strikes, tmp_path)
    for number in range(POINTS + 1):
        guest = guests.next()
        guests.snapshot(f"r-{number}")

        def work(name: str = guest.name) -> str:
            id_ = uuid7()
            why = strikes.begun("operation.flatten", {"vm": name, "id": id_})
            end = {} if why else strikes.ended(id_)
            return why or (end["error"]["reason"] if end["phase"] != "Succeeded" else "")

        why, end_s = struck(strikes, guest, work, first=not number), time.monotonic() + WITHIN_S
        while why:
            assert why in NO_GUEST | {"copy_failed", UNKNOWN_LAYERS}
            assert time.monotonic() < end_s, why
            if why == UNKNOWN_LAYERS:
                guest.stop()
                guest.restarted()
            why = work()
        disk = str(STATE / f"disks/{guest.uid}/root.qcow2")
        told = strikes.host.box.run("qemu-img", "info", "-U", "--output=json", disk)
        assert "images/data" in json.loads(told)["backing-filename"]
        strikes.nothing_staged()
    guests.end()
    nothing_left(strikes)


def test_a_reading_ends_whatever_dies(platform: Fleet, tmp_path: Path) -> None:
    strikes = Strikes(platform, "reading", OF_GUEST)
    guest = FilesGuest(strikes, tmp_path, "read")
    command = 'qemu-img convert -O raw "nbd+unix:///root?socket=$VIRTBUS_NBD_SOCKET" "$1"'
    for number in range(POINTS + 1):
        raw = tmp_path / f"{number}.raw"

        def work(raw: Path = raw) -> bool:
            id_ = uuid7()
            program = ("--", "sh", "-c", command, "read", str(raw))
            read = platform.try_cli("backup", "serve", guest.name, "--id", id_, *program)
            known = not strikes.gone("operation.get", {"id": id_})
            phase = strikes.ended(id_)["phase"] if known else "Failed"
            sys.stderr.write(f"reading: {read.returncode} {phase} {read.stderr[-300:]}\n")
            return read.returncode == 0

        if not struck(strikes, guest, work, first=not number):
            until(work, "a reading succeeds", within_s=WITHIN_S)
        assert raw.stat().st_size > MIB
        raw.unlink()
        strikes.nothing_staged()
        assert not list(strikes.path(f"vms/{guest.uid}").glob("backup-*"))
    guest.stop()
    strikes.check_all()
    guest.restarted()
    strikes.cli("vm", "delete", guest.name, "--grace", "0", "--wait")
    nothing_left(strikes)


def test_an_export_completes_whatever_dies(platform: Fleet, tmp_path: Path) -> None:
    strikes = Strikes(platform, "export", SERVICES)
    guest = FilesGuest(strikes, tmp_path, "exported")
    guest.stop()
    for number in range(POINTS + 1):
        uid, begun_s = uuid7(), time.monotonic()
        format_ = ("qcow2", "raw.gz")[number % 2]

        def work(uid: str = uid, format_: str = format_) -> Json:
            asked = {"vm": guest.name, "disk": "root", "format": format_, "id": uid}
            strikes.insist("operation.export", asked)
            return strikes.ended(uid)

        if number > 1:
            _, end = strikes.during(work)
        else:
            end = work()
            strikes.calibrate(time.monotonic() - begun_s)
        assert end["phase"] == "Succeeded", end
        strikes.nothing_staged()
        file = strikes.path(f"disks/exports/{uid}/disk.{format_}")
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        assert end["result"]["digest"] == f"sha256:{digest}"
        if format_ == "qcow2":
            strikes.check(f"disks/exports/{uid}/disk.qcow2")
        strikes.insist("operation.delete", {"id": uid})
        strikes.removed(f"disks/exports/{uid}/disk.{format_}")
    guest.restarted()
    strikes.cli("vm", "delete", guest.name, "--grace", "0", "--wait")
    nothing_left(strikes)


def test_a_copy_completes_whatever_dies(platform: Fleet, tmp_path: Path) -> None:
    strikes = Strikes(platform, "fill", SERVICES)
    guest = FilesGuest(strikes, tmp_path, "copied")
    guest.stop()
    disk = strikes.path(f"disks/{guest.uid}/root.qcow2")
    for number in range(POINTS + 1):
        uid, name, begun_s = uuid7(), f"copy-{number}", time.monotonic()

        def work(uid: str = uid, name: str = name) -> str:
            spec = {"size": 0, "source": {"vm": guest.name, "disk": "root"}}
            strikes.insist("volume.create", {"name": name, "uid": uid, "spec": spec})
            until(partial(filled, strikes, name), "the copy ends", within_s=WITHIN_S)
            return str(strikes.insist("volume.get", {"name": name})["state"])

        if number:
            _, state = strikes.during(work)
        else:
            state = work()
            strikes.calibrate(time.monotonic() - begun_s)
        assert state == "Bound"
        strikes.nothing_staged()
        (copy,) = strikes.path("disks/volumes").glob(f"default.{name}.*/disk.qcow2")
        strikes.host.box.run("qemu-img", "compare", "-U", *map(inside(strikes), (disk, copy)))
        strikes.check(str(copy.relative_to(strikes.path(""))))
        strikes.insist("volume.delete", {"name": name})
        gone = partial(strikes.gone, "volume.get", {"name": name})
        until(gone, f"{name} is gone", within_s=WITHIN_S)
        assert not copy.parent.exists()
    guest.restarted()
    strikes.cli("vm", "delete", guest.name, "--grace", "0", "--wait")
    nothing_left(strikes)


def filled(strikes: Strikes, volume: str) -> bool:
    """Return True once the copy has ended, in any way."""
    return bool(strikes.insist("volume.get", {"name": volume})["state"] != "Filling")


def inside(strikes: Strikes) -> Callable[[Path], str]:
    """Return a function that names a file as the host does."""
    return lambda path: str(STATE / path.relative_to(strikes.path("")))


def nothing_left(strikes: Strikes) -> None:
    """Remove the operations; nothing of the test is on the host."""
    layers = strikes.path("disks/layers")
    until(lambda: not list(layers.glob("*")), "no layer is left", within_s=180)
    for one in strikes.insist("operation.list", {"limit": 500}).get("items") or []:
        strikes.insist("operation.delete", {"id": one["id"]})
    strikes.platform.nothing_left()
