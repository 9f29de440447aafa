"""Simulates imaged, netd and netd's admin socket on one node.

imaged and netd answer on the bus like the real services. Tests read the recorded requests.
"""

import asyncio
import functools
import hashlib
import itertools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from virtbus.bus.client.ports import Bus, Endpoint, Request, ServiceInfo
from virtbus.schemas import subjects
from virtbus.schemas.backup import BackupsAsk, BackupWork, ScratchWork, VerifyWork
from virtbus.schemas.counters import Counters, CountersAsk
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.export_link import ExportLink, ExportLinkAsk
from virtbus.schemas.flattening import FlattenWork
from virtbus.schemas.group_rebuild import GroupsRead, KnownGroups
from virtbus.schemas.image_upload import UploadImage
from virtbus.schemas.layer import LayersAsk, UnneededLayers
from virtbus.schemas.model import Model
from virtbus.schemas.network import InterfaceStatus, NetworkInfo, NetworkState
from virtbus.schemas.network_path import NetworkAsk, NetworkView
from virtbus.schemas.nic_work import NicDone, NicWork
from virtbus.schemas.node import NodeState, ServiceState
from virtbus.schemas.node_rpc import (
    Arm,
    Ensure,
    ExportWork,
    FillWork,
    ForgetImage,
    HeldImages,
    HeldResources,
    ImageReady,
    Inspect,
    ListImages,
    NetPhase,
    NetReady,
    PullImage,
    Release,
    ReleaseReply,
    ServiceReport,
    VolumeRelease,
    WorkState,
)
from virtbus.schemas.quarantine import (
    Quarantine,
    QuarantineEntry,
    QuarantineRequest,
    QuarantineWork,
)
from virtbus.schemas.snapshot_rpc import SnapshotRelease, SnapshotWork
from virtbus.schemas.version import VERSION
from virtbus.schemas.vm import VmRecord
from virtbus.schemas.wire import validate
from virtbus.simulator.images import SimulatedImages

REPORT_S = (0.5, 5.0)
"""Seconds between reports. The first four delays are short: the agent may not listen yet."""
READY = ServiceState(state=NodeState.READY, version=VERSION, message="simulated")
DEFAULT = NetworkInfo(name="default", kind="builtin")
Answer = tuple[type[Model], Callable[[Any], Model]]
"""The model of a request, and the function that answers it."""


class SimulatedNode:
    """imaged, netd and the admin socket of one simulated node; also the `Readiness` port."""

    def __init__(self, bus: Bus, node: str) -> None:
        self._bus = bus
        self._node = node
        self.held: dict[str, int] = {}
        self.images = SimulatedImages()
        self.armed: list[str] = []
        self.disks: set[str] = set()
        self.forced: set[str] = set()
        """VMs whose network was released with `Release.forced`."""
        self.kept: dict[str, QuarantineRequest] = {}
        """The entries of the quarantine: the disks of guests that were started."""

    def answers_of(self, service: str) -> Mapping[str, Answer]:
        """Return the answers of imaged or netd, by verb."""
        if service == "netd":
            return {
                "ensure": (Ensure, self.net),
                "release": (Release, self.release),
                "inspect": (Inspect, self.inspect),
                "nic": (NicWork, lambda want: NicDone(uid=want.uid, name=want.name)),
                "path": (NetworkAsk, lambda want: NetworkView(uid=want.uid)),
                "traffic": (CountersAsk, lambda want: Counters(uid=want.uid)),
                "groups": (GroupsRead, lambda _want: KnownGroups()),
            }
        return {
            "ensure": (Ensure, self.image),
            "release": (Release, self.release_disks),
            "inspect": (Inspect, self.inspect),
            "volume-release": (VolumeRelease, self.images.release_volume),
            "export": (ExportWork, self.images.export),
            "flatten": (FlattenWork, lambda _want: WorkState(state="done")),
            "export-link": (ExportLinkAsk, _no_link),
            "fill": (FillWork, self.images.fill),
            "backup": (BackupWork, self.images.backup),
            "backup-verify": (VerifyWork, lambda _want: WorkState(state="done")),
            "scratch": (ScratchWork, lambda _want: WorkState(state="none")),
            "backups": (BackupsAsk, self.images.backups),
            "snapshot": (SnapshotWork, self.images.snapshot),
            "snapshot-release": (SnapshotRelease, self.images.release_snapshot),
            "layers": (LayersAsk, lambda _want: UnneededLayers()),
            "quarantine": (QuarantineWork, self.quarantine),
            "pull": (PullImage, lambda want: self.images.pull(want.ref, want.target)),
            "upload": (UploadImage, self.images.upload),
            "delete": (ForgetImage, lambda want: self.images.forget(want.ref)),
            "list": (ListImages, self._list),
        }

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[None]:
        """Answer while the context is open."""
        async with AsyncExitStack() as stack:
            for service in ("imaged", "netd"):
                endpoints = [
                    Endpoint(
                        f"{service}-{verb}",
                        subjects.rpc(self._node, service, verb),
                        functools.partial(_handle, *answer),
                    )
                    for verb, answer in self.answers_of(service).items()
                ]
                info = ServiceInfo(f"virtbus-{service}", VERSION, "simulated", {"node": self._node})
                await stack.enter_async_context(self._bus.serve(info, endpoints))
            yield

    async def report(self) -> None:
        """Report imaged and netd as ready, periodically; never returns by itself."""
        reports = [
            ServiceReport(service="imaged", state=READY),
            ServiceReport(service="netd", state=READY, networks=(DEFAULT,)),
        ]
        for pause_s in itertools.chain(REPORT_S[:1] * 4, itertools.repeat(REPORT_S[1])):
            for each in reports:
                await self._bus.publish(subjects.service_report(self._node, each.service), each)
            await asyncio.sleep(pause_s)

    def image(self, want: Ensure) -> ImageReady:
        record = want.record
        self.held[record.uid] = record.epoch
        self.disks.add(record.uid)
        disks = self.images.make_disks(record)
        return ImageReady(
            uid=record.uid, epoch=record.epoch, generation=record.generation, disks=disks
        )

    def net(self, want: Ensure) -> NetReady:
        record = want.record
        return NetReady(
            uid=record.uid,
            epoch=record.epoch,
            generation=record.generation,
            phase=NetPhase.READY,
            interfaces=_interfaces(record),
        )

    def release(self, want: Release) -> ReleaseReply:
        if want.forced:
            self.forced.add(want.uid)
        self._forget(want.uid)
        return ReleaseReply(uid=want.uid)

    def _forget(self, uid: str) -> None:
        self.held.pop(uid, None)
        self.images.release(uid)

    def release_disks(self, want: Release) -> ReleaseReply:
        """Release the disks; with `keep`, quarantine them if the guest was started."""
        existed, entry = want.uid in self.disks, want.uid
        while entry in self.kept:
            entry = f"{want.uid}.{int(entry.partition('.')[2] or 1) + 1}"
        self.disks.discard(want.uid)
        self._forget(want.uid)
        if not existed or want.keep is None or want.uid not in self.armed:
            return ReleaseReply(uid=want.uid)
        self.kept[entry] = want.keep
        return ReleaseReply(uid=want.uid, kept=entry)

    def quarantine(self, want: QuarantineWork) -> Quarantine:
        """Carry out a request about the quarantine; return the entries that it concerns."""
        if want.do == "list":
            entries = tuple(_kept(entry, keep) for entry, keep in sorted(self.kept.items()))
            return Quarantine(entries=entries, total=len(entries))
        entry = want.entry or ""
        keep = self.kept.get(entry)
        if keep is None:
            raise VirtbusError(Code.NOT_FOUND, "no_entry", f"there is no {entry} in quarantine")
        if want.do == "restore":
            uid = want.uid or entry
            self.release_disks(Release(uid=uid, epoch=0, keep=want.keep))
            self.disks.add(uid)
            self.armed.append(uid)
        if want.do != "get":
            del self.kept[entry]
        return Quarantine(entries=(_kept(entry, keep),), total=1, record=keep.record)

    def inspect(self, _want: Inspect) -> HeldResources:
        return HeldResources(things=dict.fromkeys(self.held, ("simulated",)))

    def _list(self, want: ListImages) -> HeldImages:
        return HeldImages(images=tuple(i for i in self.images.list() if i.digest > want.after))

    async def answers(
        self,
        uid: str,
        interfaces: Callable[[], Sequence[InterfaceStatus]],
        *,
        rebooted: bool = False,
    ) -> str:
        """Return at once: a simulated guest is ready when it runs."""
        del uid, interfaces, rebooted
        return "Simulated"

    async def arm(self, arm: Arm) -> None:
        self.armed.append(arm.uid)


async def _handle(model: type[Model], answer: Callable[[Any], Model], request: Request) -> Model:
    return answer(validate(model, request.data))


def _no_link(_want: ExportLinkAsk) -> ExportLink:
    message = "a simulated node serves no downloads"
    raise VirtbusError(Code.UNSUPPORTED, "downloads_off", message)


def _kept(entry: str, keep: QuarantineRequest) -> QuarantineEntry:
    record = keep.record
    return QuarantineEntry(
        entry=entry,
        uid=entry.partition(".")[0],
        why=keep.why,
        name=record.name if record else "",
        namespace=record.namespace if record else "",
        adoptable=record is not None,
    )


def _interfaces(record: VmRecord) -> tuple[InterfaceStatus, ...]:
    found = []
    if record.spec.network_state is NetworkState.RELEASED:
        return ()
    for index, nic in enumerate(record.spec.domain.devices.interfaces):
        octets = hashlib.sha256(f"{record.uid}/{index}".encode()).digest()
        mac = nic.mac_address or "02:" + ":".join(f"{octet:02x}" for octet in octets[:5])
        address = f"10.{octets[5]}.{octets[6]}.{octets[7] % 254 + 1}/8"
        found.append(InterfaceStatus(name=nic.name, mac=mac, addresses=(address,)))
    return tuple(found)
