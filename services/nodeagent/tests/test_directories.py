"""Directories for guests: which are allowed, how they are opened, and who has them."""

import errno
import fcntl
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from services.nodeagent.tests.test_domain_xml import UID, record

from virtbus.nodeagent.edge import virtiofsd
from virtbus.nodeagent.edge.shared_directories import HostDirectories
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.filesystem import Filesystem
from virtbus.schemas.vm import Devices, Domain, VmRecord, VmSpec

ALLOWED = {"/srv/open": ("*",), "/srv/shop": ("shop",), "/srv/pods": ()}


def sharing(directory: str, **more: Any) -> VmRecord:
    one = Filesystem(name="www", directory=directory)
    return record(VmSpec(domain=Domain(devices=Devices(filesystems=(one,)))), **more)


def directories(tmp_path: Path) -> HostDirectories:
    return HostDirectories(tmp_path / "run", tmp_path / "libexec", "n1", ALLOWED)


@pytest.mark.parametrize(
    ("directory", "more"),
    [
        ("/etc", {}),
        ("/srv/openly", {}),
        ("/srv/shop", {}),
        ("/srv/pods/a", {}),
        ("/srv/pods/a", {"owner": "cri-n2"}),
        ("/srv/pods/a", {"owner": "bridge"}),
        ("/etc", {"owner": "cri-n1"}),
    ],
)
async def test_a_directory_that_the_node_does_not_offer_is_refused(
    tmp_path: Path, directory: str, more: dict[str, Any]
) -> None:
    with pytest.raises(VirtbusError, match="directories_allowed") as caught:
        await directories(tmp_path).prepare(sharing(directory, **more))
    assert caught.value.code == Code.DENIED
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("directory", "more"),
    [
        ("/srv/open/a", {}),
        ("/srv/shop", {"namespace": "shop"}),
        ("/srv/pods/a", {"owner": "cri-n1"}),
        ("/srv/shop/a", {"owner": "cri-n1"}),
    ],
)
async def test_libvirt_gets_an_empty_folder_and_a_program_that_mounts_the_directory(
    tmp_path: Path, directory: str, more: dict[str, Any]
) -> None:
    shares = await directories(tmp_path).prepare(sharing(directory, **more))
    point = shares.points["www"]
    assert not list(point.iterdir())
    assert directory not in str(point)
    assert json.loads(point.with_suffix(".json").read_text())["directory"] == directory
    assert os.access(shares.program, os.X_OK)
    assert shares.program.read_text() == Path(virtiofsd.__file__).read_text()


async def test_a_vm_without_directories_writes_nothing(tmp_path: Path) -> None:
    made = directories(tmp_path)
    assert not (await made.prepare(record(VmSpec()))).points
    assert await made.lost(record(VmSpec())) == ()
    assert not list(tmp_path.iterdir())


async def test_the_reason_of_a_refusal_replaces_libvirts_error(tmp_path: Path) -> None:
    made, vm = directories(tmp_path), sharing("/srv/open/a")
    error = VirtbusError(Code.INTERNAL, "libvirt", "virtiofsd died unexpectedly")
    point = (await made.prepare(vm)).points["www"]
    assert await made.explained(vm, error) is error
    point.with_suffix(".failed").write_text("it is no directory")
    found = await made.explained(vm, error)
    assert (found.reason, found.code) == ("directory_refused", Code.CONFLICT)
    assert "/srv/open/a (www) is refused: it is no directory" in str(found)
    await made.prepare(vm)
    assert await made.explained(vm, error) is error


async def test_a_virtiofsd_is_lost_once_nobody_holds_its_lock(tmp_path: Path) -> None:
    made, vm = directories(tmp_path), sharing("/srv/open/a")
    point = (await made.prepare(vm)).points["www"]
    assert await made.lost(vm) == (), "the guest was started without it"
    with point.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert await made.lost(vm) == ()
    assert await made.lost(vm) == ("www",)


async def test_only_directories_of_the_guests_start_can_be_lost(tmp_path: Path) -> None:
    made, first = directories(tmp_path), sharing("/srv/open/a")
    point = (await made.prepare(first)).points["www"]
    point.with_suffix(".lock").touch()
    other = Filesystem(name="docs", directory="/srv/open/b")
    second = record(VmSpec(domain=Domain(devices=Devices(filesystems=(other,)))))
    docs = (await made.prepare(second)).points["docs"]
    docs.with_suffix(".lock").touch()
    assert await made.lost(second) == ("docs",)
    assert await made.lost(first) == ("docs",), "its record has changed while it runs"
    assert not (await made.prepare(record(VmSpec()))).points
    assert await made.lost(first) == ()


def test_the_source_is_among_the_options_of_libvirt() -> None:
    arguments = ["--fd=24", "-o", "source=/run/vms/u/fs/www,xattr,cache=auto"]
    assert virtiofsd.source_of(arguments) == Path("/run/vms/u/fs/www")
    with pytest.raises(virtiofsd.RefusedError):
        virtiofsd.source_of(["--fd=24"])


@contextmanager
def held(root: Path, directory: Path) -> Iterator[list[int]]:
    folders = virtiofsd.opened(str(root), str(directory))
    try:
        yield folders
    finally:
        for folder in folders:
            os.close(folder)


def test_a_directory_is_opened_below_its_root_without_following_links(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    for path in (root / "a" / "b", outside / "b"):
        path.mkdir(parents=True)
    (root / "file").touch()
    (root / "link").symlink_to(outside)
    (root / "a" / "link").symlink_to("b")
    with held(root, root / "a" / "b") as folders:
        assert os.path.samestat(os.fstat(folders[-1]), (root / "a" / "b").stat())
    for wrong in ("link", "link/b", "a/link", "file", "gone"):
        with pytest.raises(virtiofsd.RefusedError, match="links are not followed"):
            virtiofsd.opened(str(root), str(root / wrong))
    alias = tmp_path / "alias"  # the operator's own link
    alias.symlink_to(root)
    with held(alias, alias / "a") as folders:
        assert os.path.samestat(os.fstat(folders[-1]), (root / "a").stat())


@pytest.mark.parametrize(
    ("first", "second", "free"),
    [
        ("a:rw", "a:rw", False),
        ("a:rw", "a:ro", False),
        ("a:ro", "a:rw", False),
        ("a:ro", "a:ro", True),
        ("a:rw", "a/b:rw", False),
        ("a:rw", "a/b:ro", False),
        ("a/b:rw", "a:rw", False),
        ("a/b:rw", "c:rw", True),
    ],
)
def test_one_guest_has_a_directory_unless_all_read(
    tmp_path: Path, first: str, second: str, *, free: bool
) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "c").mkdir()

    def take(folders: list[int], wanted: str) -> None:
        virtiofsd.lock(folders, readonly=wanted.endswith(":ro"))

    with (
        held(tmp_path, tmp_path / first.partition(":")[0]) as one,
        held(tmp_path, tmp_path / second.partition(":")[0]) as other,
    ):
        take(one, first)
        if free:
            take(other, second)
        else:
            with pytest.raises(BlockingIOError) as caught:
                take(other, second)
            assert caught.value.errno == errno.EAGAIN


def test_a_refusal_names_the_vm_that_has_the_directory(tmp_path: Path) -> None:
    own = tmp_path / "vms" / "own" / "fs" / "www"
    for uid, directory in ((UID, "/srv/a/b"), ("own", "/srv/a"), ("far", "/srv/ab")):
        path = tmp_path / "vms" / uid / "fs" / "www.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({"directory": directory}))
    assert virtiofsd.holder(own, "/srv/a") == f"the VM {UID} has /srv/a/b"
    assert "another program" in virtiofsd.holder(own, "/srv/c")


def test_a_former_virtiofsd_that_does_not_end_is_a_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "www.lock"
    with path.open("w") as former, path.open() as alive:
        fcntl.flock(former, fcntl.LOCK_EX)
        monkeypatch.setattr(virtiofsd, "ENDS_S", 0.1)
        with pytest.raises(virtiofsd.RefusedError, match="still runs"):
            virtiofsd.lock_alive(alive.fileno())
        monkeypatch.setattr(virtiofsd, "ENDS_S", 10.0)
        threading.Timer(0.1, lambda: fcntl.flock(former, fcntl.LOCK_UN)).start()
        virtiofsd.lock_alive(alive.fileno())


PROGRAM = """
import os, sys, time
from virtbus.nodeagent.edge import virtiofsd
virtiofsd.ANSWERS_S = 1
virtiofsd.PROGRAMS = (sys.argv[1],)
virtiofsd.own_mounts = lambda: None
virtiofsd.mount = lambda *_, **more: None
hangs = {hangs}
virtiofsd.opened = lambda *_: time.sleep(30) if hangs else [os.open("/", os.O_RDONLY)]
virtiofsd.main(sys.argv[1:])
"""


@pytest.mark.parametrize("hangs", [True, False])
def test_a_directory_that_does_not_answer_ends_the_program_with_the_reason(
    tmp_path: Path, *, hangs: bool
) -> None:
    program, point = tmp_path / "virtiofsd", tmp_path / "www"
    program.write_text("#!/bin/sh\nsleep 1.2\necho lives\n")
    program.chmod(0o755)
    wanted = {"directory": "/srv/a", "root": "/srv", "readonly": True}
    point.with_suffix(".json").write_text(json.dumps(wanted))
    asked = [str(program), "-o", f"source={point}"]
    code = PROGRAM.format(hangs=hangs)
    ran = subprocess.run(
        [sys.executable, "-c", code, *asked],
        check=False,
        capture_output=True,
        text=True,
        timeout=20,
    )
    failed = point.with_suffix(".failed")
    if hangs:
        assert ran.returncode == 1
        assert failed.read_text() == "its file system does not answer within 1 s; check its server"
    else:
        assert (ran.returncode, ran.stdout, ran.stderr) == (0, "lives\n", "")
        assert not failed.exists()
