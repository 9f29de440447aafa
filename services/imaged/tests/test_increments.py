"""Increments of a VM that is off: its disks say what was written since the last backup."""

import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest
from services.imaged.tests.records import empty, record, uid
from services.imaged.tests.site_under_test import MIB, Node, NodeMaker
from services.imaged.tests.test_backups import (
    SIZE,
    VM,
    backing_up,
    ended,
    held,
    pushed,
    refused,
    store,
    verified,
    why_full,
    work,
)

from virtbus.imaged.core import qcow2
from virtbus.imaged.core.bitmaps import usable_bitmaps
from virtbus.imaged.core.overlay import build
from virtbus.imaged.edge.disk_threads import DiskThreads
from virtbus.schemas.backup import BackupWork, bitmap_name

BITMAP = bitmap_name(uid(10))
OURS = [{"name": "data"}, {"name": "more"}]
DIRECTORY_AT = 256


def run(*command: object) -> None:
    subprocess.run([str(word) for word in command], check=True, capture_output=True)


def disks(node: Node) -> list[Path]:
    return [node.state / "disks" / VM / f"{name}.qcow2" for name in ("data", "more")]


def write(path: Path, *parts: str) -> None:
    run("qemu-io", "-f", "qcow2", *(word for part in parts for word in ("-c", part)), path)


async def with_bitmap(made: Any, node: Node) -> None:
    """A full backup of the running guest, which then writes and is stopped."""
    await node.disks.ensure(record(empty(SIZE), empty(SIZE, "more"), uid=VM))
    for path in disks(node):
        write(path, "write -P 1 0 1M")
    await pushed(made, node, 10)
    for path in disks(node):
        run("qemu-img", "bitmap", "--add", path, BITMAP)
        write(path, "write -P 7 4M 64k", "write -z 0 64k")


def off(number: int, **more: Any) -> BackupWork:
    return work(number, disks=OURS, **more)


@pytest.mark.integration
async def test_an_increment_of_a_vm_that_is_off_has_what_was_written_since(
    make_node: NodeMaker, threads: DiskThreads
) -> None:
    async with make_node() as node, backing_up(node, threads) as made:
        await with_bitmap(made, node)
        before = [path.read_bytes() for path in disks(node)]
        for number in (11, 12):  # the bitmap stays: both rest on the same parent
            state = await ended(made, off(number, mode="incremental"))
            assert state.message == f"increment on {uid(10)}"
            found = (await held(made, number)).manifest
            assert found is not None
            assert (found.parent, found.bitmap, found.depth) == (uid(10), "", 1)
            for name in ("data", "more"):
                path = store(node) / uid(number) / f"{name}.qcow2"
                assert path.stat().st_blocks * 512 < MIB
                run("qemu-io", "-r", "-f", "qcow2", "-c", "read -P 7 4M 64k", path)
                listed = subprocess.check_output(["qemu-img", "map", "--output=json", path])
                assert b'"start": 0, "length": 65536, "depth": 0, "present": true' in listed
            assert (await verified(made, number)).state == "done"
        assert [path.read_bytes() for path in disks(node)] == before


@pytest.mark.integration
async def test_a_backup_of_a_vm_that_is_off_says_why_it_is_full(
    make_node: NodeMaker, threads: DiskThreads
) -> None:
    async with make_node() as node, backing_up(node, threads) as made:
        await with_bitmap(made, node)
        await ended(made, off(11, mode="full"))
        assert await why_full(made, 11) == "it was requested"
        await ended(made, off(12, chain=1))
        assert await why_full(made, 12) == "the chain has 1 backups"
        run("qemu-img", "bitmap", "--disable", disks(node)[1], BITMAP)
        await ended(made, off(13))
        assert "the disks have no bitmap" in await why_full(made, 13)
        assert await refused(ended(made, off(14, mode="incremental"))) == "no_parent"
        assert not list(store(node).glob(".part*"))


def disk(entries: bytes, count: int, **more: int) -> bytes:
    """A disk whose directory of bitmaps has these entries."""
    fields = {"autoclear": qcow2.AUTOCLEAR_BITMAPS, "size": len(entries), "at": DIRECTORY_AT}
    fields |= more
    head = bytearray(build(8 * MIB).pieces[0][1].ljust(4096, b"\0"))
    extension = struct.pack(">IIQQ", count, 0, fields["size"], fields["at"])
    at = qcow2.V3_HEADER_BYTES + 8
    head[at : at + 40] = struct.pack(">II", qcow2.EXT_BITMAPS, 24) + extension + bytes(8)
    head[88:96] = struct.pack(">Q", fields["autoclear"])
    head[DIRECTORY_AT : DIRECTORY_AT + len(entries)] = entries
    return bytes(head)


def entry(name: bytes, *, flags: int = 2, kind: int = 1, name_bytes: int | None = None) -> bytes:
    length = len(name) if name_bytes is None else name_bytes
    made = struct.pack(">QIIBBHI", 0, 1, flags, kind, 16, length, 0) + name
    return made + bytes(-len(made) % 8)


def read(file: bytes) -> frozenset[str]:
    return usable_bitmaps(file[:4096], lambda at, length: file[at : at + length])


def test_only_bitmaps_that_count_all_writes_are_usable() -> None:
    entries = entry(b"ours") + entry(b"in use", flags=3) + entry(b"off", flags=0)
    assert read(disk(entries + entry(b"last"), 4)) == {"ours", "last"}
    assert read(disk(entries, 3, autoclear=0)) == frozenset()
    assert read(build(8 * MIB).pieces[0][1]) == frozenset()


@pytest.mark.parametrize(
    "file",
    [
        b"",
        disk(entry(b"x", kind=9), 1),
        disk(entry(b"\xff"), 1),
        disk(entry(b"x"), 1, size=1 << 40),
        disk(entry(b"x"), 1, at=1 << 63),
        disk(entry(b"x"), 1, at=1 << 62),
        disk(entry(b"x")[:20], 1 << 31),
    ],
)
def test_a_directory_that_makes_no_sense_has_no_bitmaps(file: bytes) -> None:
    assert read(file) == frozenset()


def test_a_directory_ends_with_its_bytes() -> None:
    assert read(disk(entry(b"a") + entry(b"b", name_bytes=60000), 1 << 31)) <= {"a", "b"}
