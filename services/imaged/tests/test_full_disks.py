"""A disk that fails a write for lack of space, though it says that it has some: a clear error.

Each write of an operation fails once. Nothing partial is visible then, and a repeat succeeds.
"""

import errno
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
from services.imaged.tests import test_backups, test_exports, test_snapshots
from services.imaged.tests.filling import AT, CONTENT, Copies, filling, folder, names
from services.imaged.tests.filling import ended as filled
from services.imaged.tests.filling import work as fill
from services.imaged.tests.records import empty, named, record, ref, uid
from services.imaged.tests.site_under_test import MIB, Node, NodeMaker, Web, qcow2_image
from services.imaged.tests.test_clone_crashes import content_of, taken
from services.imaged.tests.test_snapshots import NEW, OF, OLD, VM, files, kept, vm, write
from services.imaged.tests.test_upload_crashes import MOST, Death
from services.imaged.tests.upload_client import Client, receiving

from virtbus.imaged.core.limits import TransferLimits
from virtbus.imaged.edge.disk_threads import DiskThreads
from virtbus.imaged.edge.export_conversion import ExportSource
from virtbus.imaged.edge.partial_download import store_error
from virtbus.imaged.edge.volume_files import DISK
from virtbus.imaged.exports import Converter
from virtbus.schemas.backup import BackupsAsk
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.image import parse_image_ref
from virtbus.schemas.operation import ExportFormat

COPY = ref(0, name="data-2").model_copy(update={"uid": uid(79), "copied": True})


def told(converter: Converter) -> Converter:
    """Tell a full disk as `convert` does, which reads it from qemu-img's words."""

    async def convert(
        source: ExportSource,
        target: int,
        format_: ExportFormat,
        limits: TransferLimits,
        look: Callable[[], Awaitable[None]],
        into: tuple[str, ...] = (),
    ) -> None:
        try:
            await converter(source, target, format_, limits, look, into)
        except OSError as error:
            raise store_error(error) from error

    return convert


async def tried(asking: Awaitable[object]) -> VirtbusError | None:
    """Return the error of an operation."""
    try:
        await asking
    except VirtbusError as error:
        return error
    return None


@dataclass
class Operation(ABC):
    """An operation on the disks of a node."""

    other_disks: ClassVar[tuple[str, ...]] = ()
    node: Node
    threads: DiskThreads
    server: Web

    async def begin(self) -> None:
        """Make what the operation needs."""
        await self.node.disks.ensure(vm())
        write(self.node, OLD)

    @abstractmethod
    async def do(self) -> VirtbusError | None:
        """Ensure the operation; return its error."""

    @abstractmethod
    async def look(self, *, done: bool) -> None:
        """Check that nothing partial is visible; that all is, if it is done."""


class Pull(Operation):
    async def begin(self) -> None:
        self.server.files.setdefault("a", qcow2_image(payload=64 * 1024))

    async def do(self) -> VirtbusError | None:
        return await tried(self.node.images.ensure(parse_image_ref(self.server.url("a"))))

    async def look(self, *, done: bool) -> None:
        found = [(self.node.state / name).read_bytes() for name in self.node.data()]
        assert (
            found == [self.server.files["a"]] if done else found in ([], [self.server.files["a"]])
        )


class Upload(Operation):
    async def begin(self) -> None:
        self.data = qcow2_image(payload=64 * 1024)

    async def do(self) -> VirtbusError | None:
        async with receiving(self.node, self.threads) as uploads:
            return await tried(Client(uploads, self.data).send())

    async def look(self, *, done: bool) -> None:
        found = [(self.node.state / name).read_bytes() for name in self.node.data()]
        assert found == [self.data] if done else found in ([], [self.data])


class Growth(Operation):
    async def do(self) -> VirtbusError | None:
        larger = OF.model_copy(update={"size_bytes": 16 * MIB})
        disks = (empty(16 * MIB, "own"), named())
        return await tried(self.node.disks.ensure(record(*disks, uid=VM, refs={"data": larger})))

    async def look(self, *, done: bool) -> None:
        found = (
            self.node.files.read(VM, "own"),
            self.node.disks.pools.of(OF).read(OF.folder, DISK),
        )
        sizes = {one.virtual_size_bytes for one in found if one}
        assert sizes == {16 * MIB} if done else sizes <= {8 * MIB, 16 * MIB}
        assert all(OLD in path.read_bytes() for path in files(self.node))


class Fill(Operation):
    async def do(self) -> VirtbusError | None:
        async with filling(self.node, self.threads, told(Copies())) as fills:
            return await tried(filled(fills, fill(COPY, volume=OF)))

    async def look(self, *, done: bool) -> None:
        whole = "disk.qcow2" in names(self.node, COPY)
        assert whole or not done
        if whole:
            content = (folder(self.node, COPY) / "disk.qcow2").read_bytes()
            assert content[AT : AT + len(CONTENT)] == CONTENT
        else:
            with pytest.raises(VirtbusError, match="no content yet"):
                await self.node.disks.ensure(record(named(), uid=uid(2), refs={"data": COPY}))


class Snapshot(Operation):
    layered = False

    async def do(self) -> VirtbusError | None:
        async with test_snapshots.snapshots(self.node, self.threads) as made:
            want = test_snapshots.work(10, layered=self.layered)
            return await tried(test_snapshots.ended(made, want))

    async def look(self, *, done: bool) -> None:
        there = test_snapshots.folder(self.node, 10)
        whole = (there / "record.json").exists()
        assert whole or not done
        if whole and not self.layered:
            assert kept(self.node, 10) == (OLD, OLD)
        await self.node.disks.ensure(vm())
        assert {content_of(self.node, path) for path in files(self.node)} == {OLD}


class LayeredSnapshot(Snapshot):
    layered = True


class Restore(Operation):
    layered = False

    async def begin(self) -> None:
        await taken(self.node, self.threads, layered=self.layered)

    async def do(self) -> VirtbusError | None:
        async with test_snapshots.snapshots(self.node, self.threads) as made:
            return await tried(test_snapshots.ended(made, test_snapshots.work(11, 10)))

    async def look(self, *, done: bool) -> None:
        async with test_snapshots.snapshots(self.node, self.threads):
            await self.node.disks.ensure(vm())  # waits for a restore that continues
        now = {content_of(self.node, path) for path in files(self.node)}
        assert now == {OLD} if done else now in ({OLD}, {NEW})
        assert not done or kept(self.node, 11) == (NEW, NEW)


class LayeredRestore(Restore):
    layered = True


class Export(Operation):
    async def begin(self) -> None:
        await self.node.disks.ensure(record(empty(8 * MIB), uid=VM))

    async def do(self) -> VirtbusError | None:
        converter = told(test_exports.Copies())
        async with test_exports.exporting(self.node, self.threads, converter) as exports:
            return await tried(test_exports.ended(exports))

    async def look(self, *, done: bool) -> None:
        file = test_exports.folder(self.node) / test_exports.ID / "disk.qcow2"
        assert file.exists() or not done
        assert not file.exists() or file.read_bytes() == test_exports.CONTENT


class Backup(Operation):
    other_disks = ("the backup directory is full",)

    async def begin(self) -> None:
        await self.node.disks.ensure(record(empty(8 * MIB), empty(8 * MIB, "more"), uid=VM))
        test_backups.store(self.node).mkdir()

    async def do(self) -> VirtbusError | None:
        converter = told(test_backups.copies)
        async with test_backups.backing_up(self.node, self.threads, converter=converter) as made:
            return await tried(
                test_backups.ended(made, test_backups.work(disks=[{"name": "data"}]))
            )

    async def look(self, *, done: bool) -> None:
        async with test_backups.backing_up(self.node, self.threads) as made:
            whole = (await made.held(BackupsAsk())).items
            assert whole or not done
            if whole:
                assert (await test_backups.verified(made)).state == "done"


KINDS: tuple[type[Operation], ...] = (
    *(
        Pull,
        Upload,
        Growth,
        Fill,
        Snapshot,
        LayeredSnapshot,
        Restore,
        LayeredRestore,
        Export,
        Backup,
    ),
)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_disk_that_lies_about_its_space_fails_an_operation_clearly(
    make_node: NodeMaker,
    threads: DiskThreads,
    server: Web,
    tmp_path: Path,
    kind: type[Operation],
) -> None:
    refused = 0
    for last in range(MOST):
        full = Death(last, errno.ENOSPC)
        async with make_node(state=tmp_path / f"state-{last}") as node:
            operation = kind(node, threads, server)
            await operation.begin()
            with full.reigning():
                error = await operation.do()
            if error is not None:
                assert error.reason == "disk_full", f"{error} after {last} writes"
                assert "free some space" in str(error)
                assert str(error).startswith(("the node's disk is full", *kind.other_disks))
                refused += 1
            await operation.look(done=error is None)
            assert await operation.do() is None, f"after {last} writes"
            await operation.look(done=True)
        if full.left >= 0:
            break
    else:
        pytest.fail(f"more than {MOST} writes")
    assert refused >= min(last, 3)
