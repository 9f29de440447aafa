"""`--simulate`: simulated netd and imaged with libvirt's test driver; no root, netns or QEMU.

The agent's own code is the real one. The simulated services answer on the bus like the real ones,
and record requests for tests.
"""

import asyncio
import hashlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from virtbus.bus.client.ports import (
    Bus,
    Endpoint,
    Entry,
    Gate,
    Request,
    ServiceInfo,
    Watch,
    WatchMark,
)
from virtbus.nodeagent.simulated_images import SimulatedImages
from virtbus.schemas import subjects
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.image import ImageInfo
from virtbus.schemas.network import InterfaceStatus, NetworkInfo
from virtbus.schemas.node import NodeState, ServiceState
from virtbus.schemas.node_rpc import (
    Arm,
    Ensure,
    ForgetImage,
    ForgottenImage,
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
)
from virtbus.schemas.quarantine import (
    Quarantine,
    QuarantineEntry,
    QuarantineRequest,
    QuarantineWork,
)
from virtbus.schemas.version import VERSION
from virtbus.schemas.vm import VmRecord
from virtbus.schemas.wire import validate

TELL_S = (0.5, 5.0)
"""Intervals: soon again, because the agent may not listen yet; then every 5 s of the allowed 12."""
EACH_TURN = 4
READY = ServiceState(state=NodeState.READY, version=VERSION, message="simulated")
Handler = Callable[[Request], Awaitable[Any]]


class SimulatedNode:
    """imaged, netd and the admin socket of one simulated node."""

    def __init__(self, bus: Bus, node: str) -> None:
        self._bus = bus
        self._node = node
        self.held: dict[str, int] = {}
        self.images = SimulatedImages()
        self.armed: list[str] = []
        self.disks: set[str] = set()
        self.kept: dict[str, QuarantineRequest] = {}
        """Quarantine by entry; a disk counts as written once its guest was started."""

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[None]:
        """Answer while the context is open."""
        both = {"release": self._release, "inspect": self._inspect}
        handlers: dict[str, dict[str, Handler]] = {
            "imaged": {
                **both,
                "release": self._release_disks,
                "quarantine": self._quarantine,
                "ensure": self._image,
                "pull": self._pull,
                "delete": self._delete,
                "list": self._list,
            },
            "netd": {**both, "ensure": self._net},
        }
        async with AsyncExitStack() as stack:
            for service, verbs in handlers.items():
                endpoints = [
                    Endpoint(f"{service}-{verb}", subjects.rpc(self._node, service, verb), handler)
                    for verb, handler in verbs.items()
                ]
                info = ServiceInfo(f"virtbus-{service}", VERSION, "simulated", {"node": self._node})
                await stack.enter_async_context(self._bus.serve(info, endpoints))
            yield

    async def tell(self) -> None:
        """Report imaged and netd as ready, like the real ones; never returns by itself."""
        default = NetworkInfo(name="default", kind="builtin")
        for pause_s in itertools.chain(TELL_S[:1] * 4, itertools.repeat(TELL_S[1])):
            for service, networks in (("imaged", ()), ("netd", (default,))):
                service_report = ServiceReport(service=service, state=READY, networks=networks)
                await self._bus.publish(
                    subjects.service_report(self._node, service), service_report
                )
            await asyncio.sleep(pause_s)

    async def _image(self, request: Request) -> ImageReady:
        return self.image(validate(Ensure, request.data).record)

    async def _net(self, request: Request) -> NetReady:
        return self.net(validate(Ensure, request.data).record)

    async def _release(self, request: Request) -> ReleaseReply:
        return self.release(validate(Release, request.data).uid)

    async def _release_disks(self, request: Request) -> ReleaseReply:
        return self.release_disks(validate(Release, request.data))

    async def _quarantine(self, request: Request) -> Quarantine:
        want = validate(QuarantineWork, request.data)
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

    async def _inspect(self, request: Request) -> HeldResources:
        validate(Inspect, request.data)
        return HeldResources(things=dict.fromkeys(self.held, ("simulated",)))

    async def _pull(self, request: Request) -> ImageInfo:
        return self.images.pull(validate(PullImage, request.data).ref)

    async def _delete(self, request: Request) -> ForgottenImage:
        return self.images.forget(validate(ForgetImage, request.data).ref)

    async def _list(self, request: Request) -> HeldImages:
        after = validate(ListImages, request.data).after
        return HeldImages(images=tuple(i for i in self.images.list() if i.digest > after))

    def image(self, record: VmRecord) -> ImageReady:
        """Return imaged's answer for the record."""
        self.held[record.uid] = record.epoch
        self.disks.add(record.uid)
        self.images.make_disks(record)
        disks = self.images.disks(record)
        return ImageReady(uid=record.uid, epoch=record.epoch, disks=disks)

    def net(self, record: VmRecord) -> NetReady:
        """Return netd's answer for the record."""
        return NetReady(
            uid=record.uid,
            epoch=record.epoch,
            phase=NetPhase.READY,
            interfaces=tuple(_interface(record, i) for i in range(_count(record))),
        )

    def release(self, uid: str) -> ReleaseReply:
        """Release the VM."""
        self.held.pop(uid, None)
        self.images.release(uid)
        return ReleaseReply(uid=uid)

    def release_disks(self, want: Release) -> ReleaseReply:
        """Release the VM's disks, except those to keep."""
        there, entry = want.uid in self.disks, want.uid
        while entry in self.kept:
            entry = f"{want.uid}.{int(entry.partition('.')[2] or 1) + 1}"
        self.disks.discard(want.uid)
        self.release(want.uid)
        if not there or want.keep is None or want.uid not in self.armed:
            return ReleaseReply(uid=want.uid)
        self.kept[entry] = want.keep
        return ReleaseReply(uid=want.uid, kept=entry)

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


def _kept(entry: str, keep: QuarantineRequest) -> QuarantineEntry:
    kept, record = (
        QuarantineEntry(entry=entry, uid=entry.partition(".")[0], why=keep.why),
        keep.record,
    )
    if record is None:
        return kept
    of = {"name": record.name, "namespace": record.namespace, "adoptable": True}
    return kept.model_copy(update=of)


def _count(record: VmRecord) -> int:
    return len(record.spec.domain.devices.interfaces)


def _interface(record: VmRecord, index: int) -> InterfaceStatus:
    nic = record.spec.domain.devices.interfaces[index]
    octets = hashlib.sha256(f"{record.uid}/{index}".encode()).digest()
    mac = nic.mac_address or "02:" + ":".join(f"{octet:02x}" for octet in octets[:5])
    address = f"10.{octets[5]}.{octets[6]}.{octets[7] % 254 + 1}/8"
    return InterfaceStatus(name=nic.name, mac=mac, addresses=(address,))


class LoopTurns:
    """Lets only a few VMs begin or end in each turn of the loop.

    Otherwise ten thousand VMs on a loop of hundreds of nodes would progress in lockstep: none would
    finish before nearly all, and nodes would be too busy to send heartbeats.
    """

    def __init__(self) -> None:
        self._places = asyncio.Semaphore(EACH_TURN)

    async def come(self) -> None:
        """Return in turn."""
        async with self._places:
            await asyncio.sleep(0)


class _Paced:
    """A watch whose entries are returned in turns; implements `ports.Watch`."""

    def __init__(self, watch: Watch, turns: LoopTurns) -> None:
        self._watch = watch
        self._turns = turns

    async def __aiter__(self) -> AsyncIterator[Entry | WatchMark]:
        async for item in self._watch:
            await self._turns.come()
            yield item

    def relist(self) -> None:
        self._watch.relist()


class Beside:
    """A node's bus that calls its own imaged and netd in the same process, without a server.

    On one loop, hundreds of nodes may answer late. Over the bus each would be asked again before it
    answered, which adds work without effect.
    """

    def __init__(self, bus: Bus, simulated: SimulatedNode, node: str, turns: LoopTurns) -> None:
        self._bus = bus
        self._turns = turns
        self._answers: dict[str, Callable[[Any], object]] = {
            subjects.rpc(node, "imaged", "ensure"): lambda asked: simulated.image(asked.record),
            subjects.rpc(node, "netd", "ensure"): lambda asked: simulated.net(asked.record),
            subjects.rpc(node, "imaged", "release"): simulated.release_disks,
            subjects.rpc(node, "netd", "release"): lambda asked: simulated.release(asked.uid),
        }

    def __getattr__(self, name: str) -> Any:
        """Forward all other attributes to the bus."""
        return getattr(self._bus, name)

    @asynccontextmanager
    async def node_watch(
        self, node: str, service: str, gate: Gate | None = None
    ) -> AsyncIterator[_Paced]:
        """Watch as the bus does, in turns."""
        async with self._bus.node_watch(node, service, gate) as watch:
            yield _Paced(watch, self._turns)

    async def request(
        self, subject: str, value: Any, *, timeout_s: float, request_id: str | None = None
    ) -> Any:
        answer = self._answers.get(subject)
        if answer is not None:
            await self._turns.come()
            return answer(value)
        return await self._bus.request(subject, value, timeout_s=timeout_s, request_id=request_id)
