"""Images of other formats become qcow2, and nothing else of the host gets into them."""

import asyncio
import contextlib
import hashlib
import os
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from services.imaged.tests.site_under_test import FAST, MIB, Node, NodeMaker, Web
from services.imaged.tests.test_pulls import refused

from virtbus.imaged.core.foreign import Foreign, judge
from virtbus.imaged.core.formats import claims
from virtbus.imaged.edge.conversion import Conversions
from virtbus.imaged.edge.disk_threads import DiskThreads
from virtbus.imaged.edge.partial_download import PartialDownload
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.image import ImageFormat, parse_image_ref

pytestmark = pytest.mark.integration

QCOW2 = b"QFI\xfb\0\0\0\x03"
SECRET = b"root:$y$secret-of-the-host:19000:0:99999:7:::\n"


def run(*argv: str | Path) -> str:
    done = subprocess.run(argv, check=True, capture_output=True, text=True)
    return done.stdout


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    """A disk with data, zeros and data."""
    path = tmp_path / "disk.raw"
    path.write_bytes(os.urandom(MIB) + bytes(6 * MIB) + os.urandom(MIB))
    return path


def made(raw: Path, driver: str, *options: str) -> Path:
    path = raw.with_name("disk.foreign")
    more = ("-o", ",".join(options)) if options else ()
    run("qemu-img", "convert", "-f", "raw", "-O", driver, *more, raw, path)
    return path


def with_snapshot(raw: Path) -> Path:
    path = made(raw, "qcow2")
    run("qemu-img", "snapshot", "-c", "before", path)
    return path


def with_bitmap(raw: Path) -> Path:
    path = made(raw, "qcow2")
    run("qemu-img", "bitmap", "--add", path, "b0")
    return path


def unclean(raw: Path) -> Path:
    path = made(raw, "qcow2")
    data = bytearray(path.read_bytes())
    data[79] |= 1  # incompatible feature bit 0: dirty
    path.write_bytes(data)
    return path


FORMATS: dict[str, Callable[[Path], Path]] = {
    "vmdk": lambda raw: made(raw, "vmdk"),
    "vmdk stream": lambda raw: made(raw, "vmdk", "subformat=streamOptimized"),
    "vdi": lambda raw: made(raw, "vdi"),
    "vdi static": lambda raw: made(raw, "vdi", "static=on"),
    "vhd": lambda raw: made(raw, "vpc", "force_size=on"),
    "vhd fixed": lambda raw: made(raw, "vpc", "subformat=fixed", "force_size=on"),
    "vhdx": lambda raw: made(raw, "vhdx"),
    "qcow2 with a snapshot": with_snapshot,
    "qcow2 with a bitmap": with_bitmap,
    "qcow2 that was not closed": unclean,
}


@pytest.mark.parametrize("make", FORMATS.values(), ids=FORMATS)
async def test_a_foreign_image_is_stored_as_our_qcow2(
    make_node: NodeMaker, server: Web, raw: Path, make: Callable[[Path], Path]
) -> None:
    data = server.files["a"] = make(raw).read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    async with make_node() as node:
        image = await node.images.ensure(parse_image_ref(f"{server.url('a')}@sha256:{digest}"))
        assert image.format is ImageFormat.QCOW2
        path = node.store.path(image.digest)
        run("qemu-img", "compare", "-f", "raw", "-F", "qcow2", raw, path)
        assert path.stat().st_uid == os.geteuid()
        assert node.parts() == []
        path.unlink()
        again = parse_image_ref(f"{server.url('a')}@{image.digest}")
        assert (await node.images.refresh(again)).digest == image.digest


async def test_a_compressed_foreign_image_is_unpacked_and_converted(
    make_node: NodeMaker, raw: Path
) -> None:
    async with make_node() as node:
        packed = node.source_dir / "disk.vmdk.xz"
        packed.write_bytes(subprocess.check_output(["xz", "-0c", made(raw, "vmdk")]))
        image = await node.images.ensure(parse_image_ref(f"file://{packed}"))
        run("qemu-img", "compare", "-f", "raw", "-F", "qcow2", raw, node.store.path(image.digest))
        assert node.parts() == []


# --- images that name another file -------------------------------------------------------------
def flat(secret: Path) -> bytes:
    """A VMDK descriptor whose data is in another file."""
    text = (
        "# Disk DescriptorFile\nversion=1\nCID=fffffffe\nparentCID=ffffffff\n"
        f'createType="monolithicFlat"\nRW 1 FLAT "{secret}" 0\n'
    )
    return text.encode().ljust(1024, b"\n")


def hidden_flat(secret: Path) -> bytes:
    """The same in a sparse file without data of its own: QEMU follows it."""
    head = struct.pack("<4sIIQQQQIQQQ", b"KDMV", 1, 3, 0, 128, 1, 20, 512, 0, 0, 0)
    return head.ljust(512, b"\0") + flat(secret).ljust(20 * 512, b"\0")


def backed(secret: Path) -> bytes:
    """A qcow2 with a snapshot, so that it would be converted, and with a backing file."""
    path = secret.with_name("backed")
    run("qemu-img", "create", "-q", "-f", "qcow2", "-b", secret, "-F", "raw", path)
    run("qemu-img", "snapshot", "-c", "x", path)
    return path.read_bytes()


REFERRING: dict[str, tuple[str, Callable[[Path], bytes]]] = {
    "vmdk descriptor": ("vmdk", flat),
    "vmdk without data": ("vmdk", hidden_flat),
    "qcow2": ("qcow2", backed),
}


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "shadow"
    path.write_bytes(SECRET.ljust(512, b"#"))
    path.chmod(0o644)
    tmp_path.chmod(0o755)
    return path


@contextlib.asynccontextmanager
async def two_parts(node: Node, data: bytes) -> AsyncIterator[tuple[PartialDownload, ...]]:
    parts = node.store.part("source"), node.store.part("target")
    parts[0].restart(None)
    parts[0].write(data)
    try:
        yield parts
    finally:
        for part in parts:
            part.close(keep=False)


@pytest.mark.parametrize(("driver", "make"), REFERRING.values(), ids=REFERRING)
async def test_a_file_that_an_image_names_never_leaks(
    make_node: NodeMaker,
    server: Web,
    threads: DiskThreads,
    secret: Path,
    driver: str,
    make: Callable[[Path], bytes],
) -> None:
    data = server.files["a"] = make(secret)
    unsafe = secret.with_name("unsafe")
    unsafe.write_bytes(data)
    run("qemu-img", "convert", "-f", driver, "-O", "raw", unsafe, secret.with_name("leak"))
    assert SECRET in secret.with_name("leak").read_bytes()  # the attack works
    async with make_node() as node:
        error = await refused(node.images, server.url("a"))
        assert error.reason in {"foreign_reference", "backing_file"}
        assert node.tree() == []
        async with two_parts(node, data) as (source, target):  # as if the check had missed it
            conversions = Conversions(FAST, threads)
            with pytest.raises(VirtbusError) as caught:
                await conversions.convert(
                    "x", Foreign(driver, 512), (source, target), lambda _: None
                )
            assert caught.value.reason == "conversion_failed"
            assert SECRET not in target.read_at(0, 64 * MIB)


def patched(data: bytes, offset: int, more: bytes) -> bytes:
    return data[:offset] + more + data[offset + len(more) :]


def with_parent(raw: Path) -> bytes:
    data = made(raw, "vmdk").read_bytes()
    return patched(data, data.index(b"# Extent"), b'parentFileNameHint="/etc/shadow"\n')


def twin(raw: Path) -> bytes:
    """A stream whose footer, which QEMU follows, differs from its header."""
    data = made(raw, "vmdk", "subformat=streamOptimized").read_bytes()
    data = patched(data, 56, b"\xff" * 8)  # the grain directory is at the end
    footer = patched(data[:512], 12, bytes(8))
    return data + bytes(512) + footer + bytes(512)


def vhdx_with_parent(raw: Path) -> bytes:
    data = made(raw, "vhdx").read_bytes()
    parameters = UUID("caa16737-fa36-4d43-b3b6-33f0aa44e76b").bytes_le
    (offset,) = struct.unpack_from("<I", data, data.index(parameters) + 16)
    at = data.index(b"metadata") + offset
    return patched(data, at + 4, struct.pack("<I", 2))


DIFFERENCES: dict[str, Callable[[Path], bytes]] = {
    "vmdk with a parent": with_parent,
    "vmdk with two headers": twin,
    "vmdk of many files": lambda raw: made(
        raw, "vmdk", "subformat=twoGbMaxExtentSparse"
    ).read_bytes(),
    "vdi": lambda raw: patched(made(raw, "vdi").read_bytes(), 76, struct.pack("<I", 4)),
    "vdi with a parent": lambda raw: patched(made(raw, "vdi").read_bytes(), 440, b"x" * 16),
    "vhdx": vhdx_with_parent,
    "vhdx and a disk": lambda raw: patched(made(raw, "vhdx").read_bytes(), 510, b"\x55\xaa"),
    "qcow2 and a disk": lambda raw: patched(with_snapshot(raw).read_bytes(), 510, b"\x55\xaa"),
    "vhd": lambda raw: patched(made(raw, "vpc").read_bytes()[:-512], 60, b"\0\0\0\4"),
}


@pytest.mark.parametrize("make", DIFFERENCES.values(), ids=DIFFERENCES)
async def test_an_image_that_is_not_whole_is_refused(
    make_node: NodeMaker, server: Web, raw: Path, make: Callable[[Path], bytes]
) -> None:
    server.files["a"] = make(raw)
    async with make_node() as node:
        error = await refused(node.images, server.url("a"))
        assert error.reason in {
            "foreign_reference", "header_invalid", "ambiguous_format", "unlisted_format",
        }  # fmt: skip
        assert node.tree() == []


@given(
    st.sampled_from([b"KDMV", b"vhdxfile", b"conectix", bytes(64) + b"\x7f\x10\xda\xbe", QCOW2]),
    st.binary(max_size=1200),
    st.integers(0, 1200),
    st.binary(max_size=700),
)
def test_no_bytes_break_the_judge(magic: bytes, data: bytes, at: int, more: bytes) -> None:
    data = magic + data
    data = data[:at] + more + data[at:]

    def read_at(offset: int, length: int) -> bytes:
        assert 0 <= offset < len(data)
        return data[offset : offset + length]

    with contextlib.suppress(VirtbusError):
        judge(claims(data, data[-1024:]), len(data), read_at)


# --- limits ------------------------------------------------------------------------------------
async def test_the_virtual_size_and_the_output_are_bounded(
    make_node: NodeMaker, server: Web, tmp_path: Path
) -> None:
    bomb = tmp_path / "bomb"
    run("qemu-img", "create", "-q", "-f", "vdi", bomb, "3T")
    server.files["virtual"] = bomb.read_bytes()
    (tmp_path / "sevens").write_bytes(b"\7" * (8 * MIB))
    server.files["output"] = made(
        tmp_path / "sevens", "vmdk", "subformat=streamOptimized"
    ).read_bytes()
    async with make_node() as node:
        error = await refused(node.images, server.url("virtual"))
        assert error.reason == "virtual_size_too_large"
    async with make_node(max_bytes=2 * MIB) as node:
        error = await refused(node.images, server.url("output"))
        assert error.reason == "image_too_large"
        assert node.tree() == []
    async with make_node() as node:
        server.files["damaged"] = server.files["output"][:70_000]
        error = await refused(node.images, server.url("damaged"))
        assert error.reason in {"conversion_failed", "header_invalid"}
        assert node.tree() == []


def processes(word: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return [line for line in found if word in line]


async def test_a_conversion_without_end_is_ended_by_its_cpu_time_or_by_its_caller(
    make_node: NodeMaker, threads: DiskThreads
) -> None:
    limits = replace(FAST, free_decode_s=0.0)
    driver = f"endless{os.getpid()}"
    async with make_node() as node, two_parts(node, b"x" * 512) as (source, target):
        endless = Conversions(limits, threads, ("/usr/bin/yes", "--"))
        work = endless.convert("x", Foreign(driver, 512), (source, target), lambda _: None)
        began_s = time.process_time()
        with pytest.raises(VirtbusError) as caught:
            await work
        assert caught.value.reason == "conversion_limit"
        assert time.process_time() - began_s < 1
        async with asyncio.TaskGroup() as group:
            slow = Conversions(replace(FAST, free_decode_s=100.0), threads, ("/usr/bin/yes", "--"))
            task = group.create_task(
                slow.convert("x", Foreign(driver, 512), (source, target), lambda _: None)
            )
            while not processes(driver):
                await asyncio.sleep(0.01)
            task.cancel()
        assert processes(driver) == []


@pytest.mark.parametrize(
    ("shell", "reason"),
    [
        ("echo no Landlock >&2; exit 125", "sandbox_unavailable"),
        ("echo write: No space left on device >&2; exit 1", "disk_full"),
        ("printf '\\033[31mbad' >&2; exit 1", "conversion_failed"),
        ("exit 0", ""),
    ],
)
async def test_each_end_of_qemu_img_is_reported(
    make_node: NodeMaker, threads: DiskThreads, shell: str, reason: str
) -> None:
    async with make_node() as node, two_parts(node, b"x" * 512) as (source, target):
        conversions = Conversions(FAST, threads, ("/usr/bin/sh", "-c", shell))
        work = conversions.convert("x", Foreign("vdi", 512), (source, target), lambda _: None)
        if not reason:
            await work
            assert target.offset == 0
            return
        with pytest.raises(VirtbusError) as caught:
            await work
        assert caught.value.reason == reason
        assert "\033" not in str(caught.value)


_CHILD = """
import asyncio, sys
from pathlib import Path
from services.imaged.tests.site_under_test import FAST
from virtbus.imaged.core.foreign import Foreign
from virtbus.imaged.core.limits import SpaceLimits
from virtbus.imaged.edge.conversion import Conversions
from virtbus.imaged.edge.disk_threads import DiskThreads
from virtbus.imaged.edge.store import ImageStore

async def main(state, driver):
    store = ImageStore(Path(state) / "images", SpaceLimits(0))
    parts = store.part("source"), store.part("target")
    conversions = Conversions(FAST, DiskThreads(), ("/usr/bin/yes", "--"))
    await conversions.convert("x", Foreign(driver, 512), parts, lambda _: None)

asyncio.run(main(*sys.argv[1:]))
"""


async def test_a_conversion_dies_with_imaged_and_leaves_nothing(
    make_node: NodeMaker, tmp_path: Path
) -> None:
    driver = f"orphan{os.getpid()}"
    state = tmp_path / "state"
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _CHILD, str(state), driver, cwd=Path(__file__).parents[3]
    )
    try:
        async with asyncio.timeout(30):
            while not any("/usr/bin/yes --" in line[:20] for line in processes(driver)):
                await asyncio.sleep(0.02)
    finally:
        child.kill()
        await child.wait()
    async with asyncio.timeout(10):
        while processes(driver):
            await asyncio.sleep(0.02)
    async with make_node(state=state) as node:
        assert node.tree() == []
