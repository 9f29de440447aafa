"""A volume goes to another node as a whole, and its former data goes after it is there."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from services.controller.tests.fleets import GIB, uid
from services.controller.tests.test_vm_api import played, refused
from services.controller.tests.virtual import World, settle
from services.controller.tests.volumes import tried, volume

from virtbus.bus.client.memory_bus import MemoryBus
from virtbus.bus.client.ports import Endpoint, Request, ServiceInfo
from virtbus.bus.client.streams import accepting
from virtbus.controller.core.volume_holds import ref_of
from virtbus.controller.edge.operation_room import OperationRoom
from virtbus.schemas import subjects
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.image import ImageFormat, ImageInfo
from virtbus.schemas.image_upload import UploadedImage, UploadImage
from virtbus.schemas.node_rpc import (
    ForgetImage,
    ForgottenImage,
    HeldResources,
    HeldVolume,
    VolumeRelease,
    VolumeReleased,
)
from virtbus.schemas.operation import (
    ExportResult,
    OperationPhase,
    OperationRecord,
    OperationStatus,
)
from virtbus.schemas.pool import NodePools, PoolKind, PoolReport, PoolState
from virtbus.schemas.streams import ExportRead
from virtbus.schemas.vm import JoinNonce
from virtbus.schemas.volume import VolumeMove, VolumeRecord, VolumeSpec, VolumeState
from virtbus.schemas.volume_api import VolumeView
from virtbus.schemas.volume_ref import VolumeRef
from virtbus.schemas.wire import encode, read, validate

KEY = subjects.volume_record("default", "data")
FILE = bytes(range(256)) * 2000
DIGEST = f"sha256:{hashlib.sha256(FILE).hexdigest()}"


@dataclass
class Nodes:
    """The services of n1, which has an exported file, and of n2, which receives it."""

    stored: bytearray = field(default_factory=bytearray)
    image: str = ""
    """The name of the complete file on n2."""
    released: list[tuple[str, bool]] = field(default_factory=list)
    """The nodes that removed data, each with True if the volume's record named it then."""
    refs: list[VolumeRef] = field(default_factory=list)
    """The data that was removed."""
    made_by: list[str | None] = field(default_factory=list)
    """For each of them: the fill whose data alone is removed."""
    fails: list[VirtbusError] = field(default_factory=list)
    """Errors of the next pieces."""
    has_lost: bool = False
    """True: n1 has no data any more, though the bus says so."""
    world: World | None = None

    async def inspect(self, _: Request) -> HeldResources:
        folder = ref_of(await stored(self._made)).folder
        return HeldResources(volumes=() if self.has_lost else (HeldVolume(folder=folder),))

    async def export(self, request: Request) -> None:
        want = validate(ExportRead, request.data)
        bus = MemoryBus(self._made.server, "n1-stream")
        async with accepting(bus, request, want) as stream:
            await stream.write(FILE[want.offset :])
            stream.end("end of file")

    async def upload(self, request: Request) -> UploadedImage:
        want = validate(UploadImage, request.data)
        assert (want.digest, want.size_bytes) == (DIGEST, len(FILE))
        if want.data and self.fails:
            raise self.fails.pop()
        if want.at == len(self.stored):
            self.stored += want.data
        image = None
        if len(self.stored) == len(FILE):
            assert bytes(self.stored) == FILE
            self.image = want.name
            image = ImageInfo(
                digest=DIGEST, format=ImageFormat.QCOW2, size_bytes=1, virtual_size_bytes=GIB
            )
        return UploadedImage(offset_bytes=len(self.stored), image=image)

    def release(self, node: str) -> Any:
        async def release(request: Request) -> VolumeReleased:
            want = validate(VolumeRelease, request.data)
            self.refs.append(want.ref)
            self.made_by.append(want.made_by)
            self.released.append((node, (await stored(self._made)).node == node))
            return VolumeReleased(found=True)

        return release

    async def forget(self, request: Request) -> ForgottenImage:
        ref = validate(ForgetImage, request.data).ref
        if ref != self.image:
            raise VirtbusError(Code.NOT_FOUND, "image_unknown", ref)
        self.image = ""
        return ForgottenImage(names=(ref,))

    @property
    def _made(self) -> World:
        assert self.world is not None
        return self.world

    @asynccontextmanager
    async def serve(self, made: World) -> AsyncIterator[None]:
        self.world = made
        verbs: dict[tuple[str, str, str], Any] = {
            ("n1", "agent", "export"): self.export,
            ("n2", "imaged", "upload"): self.upload,
            ("n2", "imaged", "delete"): self.forget,
            ("n1", "imaged", "inspect"): self.inspect,
            ("n1", "imaged", "volume-release"): self.release("n1"),
            ("n2", "imaged", "volume-release"): self.release("n2"),
        }
        endpoints = [
            Endpoint("-".join(each), subjects.rpc(*each), call) for each, call in verbs.items()
        ]
        async with made.host.serve(ServiceInfo("nodes", "1.0.0"), endpoints):
            yield


async def stored(made: World) -> VolumeRecord:
    entry = await made.host.get(KEY)
    assert entry is not None
    return read(VolumeRecord, entry.value)


async def with_data(made: World, **more: Any) -> VolumeRecord:
    one = volume(1, **{"bound": True, "node": "n1", **more})
    await made.host.put(KEY, encode(one))
    await settle()
    return one


async def move(made: World, node: str = "n2") -> VolumeView:
    return validate(VolumeView, await made.ask("move", "volume", name="data", node=node))


async def get(made: World) -> VolumeView:
    return validate(VolumeView, await made.ask("get", "volume", name="data"))


async def operation(made: World, kind: str) -> OperationRecord | None:
    page = await made.ask("list", "operation")
    for item in page["items"]:
        if item["kind"] == kind:
            entry = await made.host.get(subjects.operation_record(item["node"], item["id"]))
            assert entry is not None
            return read(OperationRecord, entry.value)
    return None


async def ends(
    made: World, kind: str, phase: OperationPhase = OperationPhase.SUCCEEDED, **more: Any
) -> OperationRecord:
    """Wait for an operation, end it as its node does, and let the leader see it."""
    while (one := await operation(made, kind)) is None:
        await asyncio.sleep(0.5)
    if kind == "export" and phase is OperationPhase.SUCCEEDED:
        more["result"] = ExportResult(path="/x", size_bytes=len(FILE), digest=DIGEST)
    status = OperationStatus(id=one.id, node=one.node, phase=phase, ended_ns=1, **more)
    await made.host.put(subjects.operation_status(one.node, one.id), encode(status))
    await asyncio.sleep(5)
    return one


@played(nodes=2)
async def test_a_volume_is_on_the_other_node_once_all_its_bytes_are(made: World) -> None:
    nodes = Nodes()
    source = {"spec": VolumeSpec.model_validate({"size": GIB, "source": {"image": "tiny"}})}
    await with_data(made, **source)
    async with nodes.serve(made):
        view = await move(made)
        assert (view.state, view.node, view.moving_to) == (VolumeState.MOVING, "n1", "n2")
        assert await move(made) == view, "a repeat changes nothing"
        again = await tried(made.ask("create", name="vm", volumes=["data"]))
        assert again != "done"
        nodes.fails = [VirtbusError(Code.UNAVAILABLE, "recovering", "x", after_ms=500)]
        export = await ends(made, "export")
        assert (export.node, export.uid) == ("n1", view.uid)
        fill = await ends(made, "fill", virtual_size_bytes=GIB)
        assert (fill.node, fill.ref and fill.ref.copied) == ("n2", True)
        assert fill.source is not None
        assert (fill.source.moved, fill.source.image.endswith(f"@{DIGEST}")) == (True, True)
        await asyncio.sleep(10)
    view = await get(made)
    assert (view.state, view.node, view.moving_to, view.message) == ("Bound", "n2", "", "")
    assert nodes.released == [("n1", False)]
    assert nodes.image == ""
    record = await stored(made)
    assert (record.move, record.fill and record.fill.state) == (None, "Filled")
    assert await operation(made, "export") is None, "the file on the source is removed"


@played(nodes=2)
async def test_a_failure_leaves_the_volume_where_it_is(made: World) -> None:
    nodes = Nodes()
    await with_data(made)
    async with nodes.serve(made):
        await move(made)
        await ends(made, "export")
        error = VirtbusError(Code.UNAVAILABLE, "disk_full", "the disk of n2 is full").body
        await ends(made, "fill", OperationPhase.FAILED, error=error)
        await asyncio.sleep(5)
        view = await get(made)
        assert (view.state, view.node) == ("Bound", "n1")
        assert view.message == "the move to n2 failed: the disk of n2 is full"
        failed = (await stored(made)).move
        assert failed is not None
        assert nodes.made_by == [failed.fill], "other data on n2 stays"
        assert nodes.released == [("n2", False)]
        assert (await move(made)).state == VolumeState.MOVING


@played(nodes=2)
async def test_a_move_is_given_up_by_a_move_to_its_own_node(made: World) -> None:
    nodes = Nodes()
    await with_data(made)
    async with nodes.serve(made):
        await move(made)
        while await operation(made, "export") is None:
            await asyncio.sleep(0.5)
        assert (await move(made, "n1")).state == VolumeState.BOUND
        await asyncio.sleep(5)
        export = await operation(made, "export")
        assert export is None or export.cancel
    assert "given up" in (await get(made)).message


@played(nodes=2)
async def test_a_full_quota_of_operations_refuses_only_the_begin_of_a_move(
    made: World,
) -> None:
    def full(*_: object) -> None:
        raise VirtbusError(Code.EXHAUSTED, "operation_quota", "full")

    nodes = Nodes()
    await with_data(made)
    async with nodes.serve(made):
        with pytest.MonkeyPatch.context() as patched:
            await move(made)
            patched.setattr(OperationRoom, "refuse_more", full)
            assert (await move(made)).state == VolumeState.MOVING, "a repeat"
            assert (await move(made, "n1")).state == VolumeState.BOUND, "it is given up"
            await asyncio.sleep(10)
            assert (await refused(move(made))).reason == "operation_quota"


@played(nodes=2)
async def test_what_cannot_move_is_refused_with_the_next_step(made: World) -> None:
    await with_data(made, holder=uid(9))
    error = await refused(move(made))
    assert (error.code, error.reason) == (409, "volume_in_use")
    assert "volume detach data" in error.body.message
    assert (await refused(move(made, "n7"))).code == 404
    await with_data(made, deleting=True)
    assert (await refused(move(made))).reason == "deleting"
    await with_data(made, bound=False, node="")
    view = await move(made)
    assert (view.node, view.state) == ("n2", "Available"), "it has no data yet"
    await with_data(made, pool_kind="nbd")
    assert (await refused(move(made))).reason == "volume_shared"
    await with_data(made, lost=True)
    assert (await refused(move(made))).reason == "volume_lost"


@played(nodes=2)
async def test_a_delete_of_a_moving_volume_removes_the_data_of_both_nodes(made: World) -> None:
    nodes = Nodes()
    await with_data(made)
    async with nodes.serve(made):
        await move(made)
        await ends(made, "export")
        await asyncio.sleep(5)
        await made.ask("delete", "volume", name="data")
        fill = await operation(made, "fill")
        assert fill is not None
        await asyncio.sleep(6)
        await ends(made, "fill", OperationPhase.CANCELLED)
        await asyncio.sleep(10)
    entry = await made.host.get(KEY)
    assert entry is None or not entry.value or entry.why
    assert {node for node, _ in nodes.released} == {"n1", "n2"}
    assert nodes.image == ""


@played(nodes=2)
async def test_a_delete_while_the_bytes_are_carried_leaves_nothing(made: World) -> None:
    """The leader's task has read the volume before the delete, and would fill it afterwards."""
    nodes, begun, may_end = Nodes(), asyncio.Event(), asyncio.Event()
    upload = nodes.upload

    async def slow(request: Request) -> UploadedImage:
        answer = await upload(request)
        if validate(UploadImage, request.data).at == len(FILE):
            begun.set()
            await may_end.wait()
        return answer

    nodes.upload = slow  # type: ignore[method-assign]
    await with_data(made)
    async with nodes.serve(made):
        await move(made)
        await ends(made, "export")
        await begun.wait()
        await made.ask("delete", "volume", name="data")
        await asyncio.sleep(10)
        entry = await made.host.get(KEY)
        assert entry is None or not entry.value
        may_end.set()
        await asyncio.sleep(10)
        assert await operation(made, "fill") is None
    assert {node for node, _ in nodes.released} == {"n1", "n2"}
    assert nodes.image == ""


@played(nodes=1)
async def test_a_delete_waits_for_a_node_that_is_off_since_before_the_controllers(
    made: World,
) -> None:
    nodes = Nodes()
    await made.host.put(subjects.join_nonce("n2"), encode(JoinNonce(nonce="x")))
    move = VolumeMove(source="n1", target="n2", export=uid(70), fill=uid(71))
    await with_data(made, move=move, deleting=True)
    await asyncio.sleep(20)
    assert (await get(made)).state == VolumeState.DELETING
    async with nodes.serve(made):
        await asyncio.sleep(20)
    assert {node for node, _ in nodes.released} == {"n1", "n2"}
    assert (await refused(get(made))).code == 404


@played(nodes=2, controllers=2)
async def test_a_restored_bus_continues_a_move_from_the_volumes_record(made: World) -> None:
    nodes = Nodes()
    await with_data(made)
    async with nodes.serve(made):
        await move(made)
        await ends(made, "export")
        await ends(made, "fill")
        await asyncio.sleep(10)
        assert (await get(made)).node == "n2"
        old = await stored(made)
        moves = VolumeMove(source="n1", target="n2", export=uid(70), fill=uid(71))
        moving = old.model_copy(update={"node": "n1", "move": moves})
        await made.host.put(KEY, encode(moving))
        await asyncio.sleep(5)
        again = await operation(made, "export")
        assert again is not None
        assert (again.id, again.node) == (uid(70), "n1")


@played(nodes=2)
async def test_a_restored_bus_does_not_remove_the_data_that_the_move_had_brought(
    made: World,
) -> None:
    nodes = Nodes(has_lost=True)
    await with_data(made)
    async with nodes.serve(made):
        await move(made)
        error = VirtbusError(Code.NOT_FOUND, "no_disk", "n1 has no data").body
        await ends(made, "export", OperationPhase.FAILED, error=error)
        await asyncio.sleep(10)
        assert "n1 has no data" in (await get(made)).message
        assert nodes.released == [], "n2 may have the only copy"
        assert not (await stored(made)).has_open_move


# --- between pools ---------------------------------------------------------------------------
async def two_pools(made: World, kind: PoolKind = PoolKind.LOCAL, *assigned: str) -> None:
    """n1 has a second pool; n2 has it, too."""
    for node in ("n1", "n2"):
        fast = PoolReport(
            name="fast", kind=kind, state=PoolState.READY, size_bytes=10 * GIB, assigned=assigned
        )
        await made.host.put(subjects.node_pools(node), encode(NodePools(node=node, pools=(fast,))))
    await settle()


async def to_pool(made: World, pool: str = "fast", **more: Any) -> VolumeView:
    asked = {"name": "data", "pool": pool, **more}
    return validate(VolumeView, await made.ask("move", "volume", **asked))


@played(nodes=2)
async def test_a_volume_goes_to_another_pool_of_its_node_by_one_copy(made: World) -> None:
    nodes = Nodes()
    await two_pools(made)
    await with_data(made)
    async with nodes.serve(made):
        view = await to_pool(made)
        assert (view.state, view.node, view.spec.pool) == (VolumeState.MOVING, "n1", "local")
        assert await to_pool(made) == view, "a repeat changes nothing"
        assert (await refused(move(made))).reason == "volume_moving"
        fill = await ends(made, "fill", virtual_size_bytes=GIB)
        assert (fill.node, fill.ref and fill.ref.pool) == ("n1", "fast")
        assert fill.source is not None
        assert fill.source.volume is not None
        assert (fill.source.moved, fill.source.volume.pool) == (True, "local")
        await asyncio.sleep(10)
    view = await get(made)
    assert (view.state, view.node, view.spec.pool, view.message) == ("Bound", "n1", "fast", "")
    assert [ref.pool for ref in nodes.refs] == ["local"]
    assert (await stored(made)).move is None
    assert await operation(made, "export") is None, "nothing was written to a file"


@played(nodes=2)
async def test_a_volume_goes_to_another_pool_of_another_node(made: World) -> None:
    nodes = Nodes()
    await two_pools(made)
    await with_data(made)
    async with nodes.serve(made):
        await to_pool(made, node="n2")
        await ends(made, "export")
        fill = await ends(made, "fill", virtual_size_bytes=GIB)
        assert (fill.node, fill.ref and fill.ref.pool) == ("n2", "fast")
        await asyncio.sleep(10)
    view = await get(made)
    assert (view.state, view.node, view.spec.pool) == ("Bound", "n2", "fast")
    assert (nodes.released, [ref.pool for ref in nodes.refs]) == ([("n1", False)], ["local"])


@played(nodes=2)
async def test_a_failed_move_between_pools_leaves_nothing_in_the_other_one(made: World) -> None:
    nodes = Nodes()
    await two_pools(made)
    await with_data(made)
    async with nodes.serve(made):
        await to_pool(made)
        error = VirtbusError(Code.UNAVAILABLE, "disk_full", "the pool fast is full").body
        await ends(made, "fill", OperationPhase.FAILED, error=error)
        await asyncio.sleep(5)
        view = await get(made)
        assert (view.state, view.spec.pool) == ("Bound", "local")
        assert view.message == "the move to the pool fast failed: the pool fast is full"
        assert [ref.pool for ref in nodes.refs] == ["fast"]
        assert (await to_pool(made)).state == VolumeState.MOVING
        assert (await to_pool(made, "local")).state == VolumeState.BOUND
        assert "given up" in (await get(made)).message


@played(nodes=2)
async def test_a_delete_while_it_moves_removes_the_data_of_both_pools(made: World) -> None:
    nodes = Nodes()
    await two_pools(made)
    await with_data(made)
    async with nodes.serve(made):
        await to_pool(made)
        while await operation(made, "fill") is None:
            await asyncio.sleep(0.5)
        await made.ask("delete", "volume", name="data")
        await asyncio.sleep(6)
        await ends(made, "fill", OperationPhase.CANCELLED)
        await asyncio.sleep(10)
    assert {ref.pool for ref in nodes.refs} == {"local", "fast"}


@played(nodes=2)
async def test_a_pool_that_cannot_take_the_data_is_refused_with_the_next_step(made: World) -> None:
    await with_data(made)
    assert (await refused(to_pool(made))).reason == "no_pool"
    await two_pools(made, PoolKind.NBD, "default.data")
    error = await refused(to_pool(made))
    assert (error.reason, "of the kind nbd" in str(error)) == ("no_pool", True)
    await two_pools(made, PoolKind.BLOCK)
    error = await refused(to_pool(made))
    assert (error.reason, "nothing for default.data" in str(error)) == ("no_pool", True)
    small = PoolReport(
        name="fast",
        kind=PoolKind.BLOCK,
        state=PoolState.READY,
        assigned=("default.data",),
        place_bytes={"default.data": GIB // 2},
    )
    await made.host.put(subjects.node_pools("n1"), encode(NodePools(node="n1", pools=(small,))))
    await settle()
    error = await refused(to_pool(made))
    assert (error.reason, "has 512MiB" in str(error)) == ("no_pool", True)
    await two_pools(made)
    await with_data(made, bound=False, node="")
    assert (await refused(to_pool(made))).reason == "no_data"


@played(nodes=2)
async def test_a_volume_goes_to_a_device_and_back(made: World) -> None:
    nodes = Nodes()
    await two_pools(made, PoolKind.BLOCK, "default.data")
    await with_data(made)
    async with nodes.serve(made):
        await to_pool(made)
        fill = await ends(made, "fill", virtual_size_bytes=GIB)
        assert (fill.ref and fill.ref.kind, fill.source and fill.source.moved) == ("block", True)
        await asyncio.sleep(10)
        record = await stored(made)
        assert (record.spec.pool, record.pool_kind, record.move) == ("fast", "block", None)
        assert [(ref.pool, ref.kind) for ref in nodes.refs] == [("local", "local")]

        await to_pool(made, "local")
        move = (await stored(made)).move
        assert move is not None
        entry = None
        while entry is None:
            await asyncio.sleep(0.5)
            entry = await made.host.get(subjects.operation_record("n1", move.fill))
        back = read(OperationRecord, entry.value)
        assert (back.ref and back.ref.kind, back.ref and back.ref.pool) == ("local", "local")
        assert (back.source and back.source.volume and back.source.volume.kind) == "block"
