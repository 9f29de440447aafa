"""Plays two hosts with VMs that are off, whose volumes move: their agents and their imaged."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from services.controller.tests.fleets import GIB, node, status, uid
from services.controller.tests.virtual import World, settle

from virtbus.bus.client.memory_bus import MemoryBus
from virtbus.bus.client.ports import Endpoint, Entry, EntryKind, Request, ServiceInfo, WatchMark
from virtbus.bus.client.streams import accepting
from virtbus.bus.errors import BusError
from virtbus.bus.runtime.tasks import background
from virtbus.controller.core.volume_holds import ref_of
from virtbus.schemas import subjects
from virtbus.schemas.errors import Code, ErrorBody, VirtbusError
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
from virtbus.schemas.records import read_volume
from virtbus.schemas.states import VmState
from virtbus.schemas.streams import ExportRead
from virtbus.schemas.vm import VmRecord
from virtbus.schemas.volume import VolumeRecord
from virtbus.schemas.volume_ref import VolumeRef
from virtbus.schemas.wire import encode, read, validate

NODES = ("n1", "n2")
ROUND_S = 0.3
FILE = bytes(range(256)) * 200
DIGEST = f"sha256:{hashlib.sha256(FILE).hexdigest()}"
Place = tuple[str, str, str]
"""A copy of a volume's data: its node, its pool, and the volume's name."""


@dataclass
class OffHosts:
    """n1 and n2, each with the pools local and fast. Their agents say what the records ask for."""

    made: World
    data: set[Place] = field(default_factory=set)
    """The copies that are on the hosts."""
    written: set[Place] = field(default_factory=set)
    """Those to which a guest has written. A guest runs on one copy."""
    held_back: set[str] = field(default_factory=set)
    """Names of volumes whose fills do not end."""
    failing: dict[str, ErrorBody] = field(default_factory=dict)
    """The failures of fills by the names of their volumes."""
    stuck: bool = False
    """True: no agent releases a VM."""
    kind: PoolKind = PoolKind.LOCAL
    """The kind of the pool fast. Of devices, it has one for `data` and one for `logs`."""
    silent: set[str] = field(default_factory=set)
    """Nodes that are off."""
    files: dict[str, bytearray] = field(default_factory=dict)
    lost: list[Place] = field(default_factory=list)
    """Copies that were removed while the volume's record named them."""

    @asynccontextmanager
    async def on(self) -> AsyncIterator[None]:
        """Let both hosts work."""
        bus, made = MemoryBus(self.made.server, "hosts"), self.made
        assigned = ("default.data", "default.logs") if self.kind is PoolKind.BLOCK else ()
        fast = PoolReport(
            name="fast",
            kind=self.kind,
            state=PoolState.READY,
            size_bytes=10 * GIB,
            assigned=assigned,
        )
        for one in NODES:
            await bus.put(subjects.node_pools(one), encode(NodePools(node=one, pools=(fast,))))
        verbs: dict[tuple[str, str], Any] = {
            ("agent", "export"): self._export,
            ("imaged", "upload"): self._upload,
            ("imaged", "delete"): self._forget,
        }
        endpoints = [
            Endpoint(f"{one}-{verb}", subjects.rpc(one, service, verb), call)
            for one in NODES
            for (service, verb), call in verbs.items()
        ]
        for one in NODES:
            subject = subjects.rpc(one, "imaged", "volume-release")
            endpoints.append(Endpoint(f"{one}-release", subject, self._release(one)))
            subject = subjects.rpc(one, "imaged", "inspect")
            endpoints.append(Endpoint(f"{one}-inspect", subject, self._inspect(one)))
        async with background() as tasks, bus.serve(ServiceInfo("off", "1.0.0"), endpoints):
            tasks.start(self._play(bus))
            for one in NODES:
                await made.hear(node(one))
            await settle()
            yield

    # --- imaged -----------------------------------------------------------------------------
    async def _export(self, request: Request) -> None:
        want = validate(ExportRead, request.data)
        async with accepting(MemoryBus(self.made.server, "stream"), request, want) as stream:
            await stream.write(FILE[want.offset :])
            stream.end("end of file")

    async def _upload(self, request: Request) -> UploadedImage:
        want, image = validate(UploadImage, request.data), None
        stored = self.files.setdefault(want.name, bytearray())
        if want.at == len(stored):
            stored += want.data
        if len(stored) == len(FILE):
            image = ImageInfo(
                digest=DIGEST, format=ImageFormat.QCOW2, size_bytes=1, virtual_size_bytes=GIB
            )
        return UploadedImage(offset_bytes=len(stored), image=image)

    async def _forget(self, request: Request) -> ForgottenImage:
        ref = validate(ForgetImage, request.data).ref
        if self.files.pop(ref, None) is None:
            raise VirtbusError(Code.NOT_FOUND, "image_unknown", ref)
        return ForgottenImage(names=(ref,))

    def _release(self, on: str) -> Any:
        async def release(request: Request) -> VolumeReleased:
            want = validate(VolumeRelease, request.data)
            record = await self.volume(want.ref.name)
            place = _place(on, want.ref)
            if want.kept is not None and _place(on, want.kept) not in self.data:
                return VolumeReleased()
            if record is not None and place == _home(record) and not record.deleting:
                self.lost.append(place)
            self.data.discard(place)
            return VolumeReleased(found=True)

        return release

    def _inspect(self, on: str) -> Any:
        async def inspect(_: Request) -> HeldResources:
            found = [await self.volume(name) for node, _, name in self.data if node == on]
            folders = sorted({ref_of(one).folder for one in found if one is not None})
            return HeldResources(volumes=tuple(HeldVolume(folder=one) for one in folders))

        return inspect

    # --- agents -----------------------------------------------------------------------------
    async def _play(self, bus: MemoryBus) -> None:
        while True:
            for one in set(NODES) - self.silent:
                await self.made.hear(node(one))
            with suppress(BusError):
                for entry in await _entries(bus):
                    await self._act(bus, entry)
            await asyncio.sleep(ROUND_S)

    async def _act(self, bus: MemoryBus, entry: Entry) -> None:
        tokens = entry.key.removeprefix("$KV.vm.").split(".")
        if tokens[0] in self.silent:
            return
        if len(tokens) == 3 and tokens[1] == "_op":
            await self._operate(bus, read(OperationRecord, entry.value))
        elif len(tokens) == 2 and tokens[0] in NODES and not tokens[1].startswith("_"):
            await self._run(bus, read(VmRecord, entry.value))

    async def _run(self, bus: MemoryBus, vm: VmRecord) -> None:
        state = VmState.RUNNING if vm.powered and not vm.evacuating else VmState.STOPPED
        said = status(vm, state, released=vm.evacuating and not self.stuck)
        key = subjects.vm_status(vm.node, vm.uid)
        there = await bus.get(key)
        if there is None or there.value != encode(said):
            await bus.put(key, encode(said))
        if state is VmState.RUNNING:
            refs = vm.volume_refs.values()
            self.written |= {_place(vm.node, ref) for ref in refs}
            self.data |= {_place(vm.node, ref) for ref in refs if not ref.copied}

    async def _operate(self, bus: MemoryBus, op: OperationRecord) -> None:
        key = subjects.operation_status(op.node, op.id)
        there = await bus.get(key)
        if there is not None and there.value and read(OperationStatus, there.value).ended:
            return
        now_ns, assumed = bus.sources.time_ns(), op.ref
        done: dict[str, Any] = {"id": op.id, "node": op.node, "ended_ns": max(now_ns, 1)}
        if op.cancel:
            done["phase"] = OperationPhase.CANCELLED
        elif op.kind == "fill" and op.name in self.failing:
            done |= {"phase": OperationPhase.FAILED, "error": self.failing[op.name]}
        elif op.name in self.held_back or assumed is None:
            return
        else:
            done["phase"] = OperationPhase.SUCCEEDED
            if op.kind == "export":
                done["result"] = ExportResult(path="/x", size_bytes=len(FILE), digest=DIGEST)
            else:
                done["virtual_size_bytes"] = GIB
                self.data.add(_place(op.node, assumed))
        await bus.put(key, encode(OperationStatus(**done)))

    # --- the bus ----------------------------------------------------------------------------
    async def volume(self, name: str = "data") -> VolumeRecord | None:
        """Return the record of a volume."""
        key = subjects.volume_record("default", name)
        entry = await self.made.host.get(key)
        return read_volume(key, entry.value) if entry is not None and entry.value else None

    async def vm(self, number: int = 1) -> VmRecord:
        found = await self.made.stored(uid(number))
        assert found is not None
        return found

    async def idle(self, *names: str, within_s: float = 120.0) -> None:
        """Wait until no move of these volumes has anything left to do."""
        for _ in range(int(within_s / ROUND_S)):
            found = [await self.volume(name) for name in names]
            if not any(one is not None and one.has_open_move for one in found):
                return
            await asyncio.sleep(ROUND_S)
        msg = f"{names} still move: {[await self.volume(name) for name in names]}"
        raise AssertionError(msg)

    async def well(self, *names: str) -> None:
        """The data of each volume is where its record and its VM say, and nowhere else."""
        assert self.lost == []
        homes: set[Place] = set()
        for name in names:
            one = await self.volume(name)
            assert one is not None
            homes.add(_home(one))
            if one.holder:
                vm = await self.made.stored(one.holder)
                assert vm is not None
                (ref,) = [ref for ref in vm.volume_refs.values() if ref.name == name]
                assert _place(vm.node, ref) == _home(one)
        assert self.data == homes
        assert self.files == {}


def _place(on: str, ref: VolumeRef) -> Place:
    return on, ref.pool, ref.name


def _home(record: VolumeRecord) -> Place:
    return record.node, record.spec.pool, record.name


async def _entries(bus: MemoryBus) -> list[Entry]:
    found = []
    async with bus.watch("$KV.vm.>") as watch:
        async for item in watch:
            if item is WatchMark.SYNCED:
                break
            if isinstance(item, Entry) and item.kind is EntryKind.PUT:
                found.append(item)
    return found


async def with_vm(hosts: OffHosts, *names: str, own_disk: bool = False, **spec: Any) -> VmRecord:
    """A VM on n1 with empty volumes of these names, which ran once and is off."""
    made = hosts.made
    for name in names:
        size = {"size": "1GiB"}
        await made.ask("create", "volume", name=name, spec=size, node="n1")
    disks = [{"name": f"disk-{name}", "volume": {"name": name}} for name in names]
    asked: dict[str, Any] = {"name": "web", "uid": uid(1), "spec": {"volumes": disks, **spec}}
    if own_disk:
        asked["image"] = "tiny"
    await made.ask("create", **asked)
    await asyncio.sleep(2)
    await made.ask("stop", uid=uid(1))
    await asyncio.sleep(2)
    return await hosts.vm()
