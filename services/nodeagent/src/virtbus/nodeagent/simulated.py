"""`--simulate`: recorded netd and imaged beside libvirt's test driver; no root, netns or QEMU.

The agent's own path is the real one; these answer on the bus as the real services do, and keep
what they were asked, so that a test can read it.
"""

import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from virtbus.bus.ports import Bus, Endpoint, Request, ServiceInfo
from virtbus.schemas import subjects
from virtbus.schemas.image import ImageFormat
from virtbus.schemas.network import InterfaceStatus
from virtbus.schemas.nodework import (
    Arm,
    DiskFile,
    Ensure,
    ImageReady,
    NetPhase,
    NetReady,
    Release,
    Released,
)
from virtbus.schemas.vm import VmRecord
from virtbus.schemas.wire import validate


class SimulatedNode:
    """imaged, netd and the admin socket of one simulated node."""

    def __init__(self, bus: Bus, node: str) -> None:
        self._bus = bus
        self._node = node
        self.held: dict[str, int] = {}
        self.armed: list[str] = []

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[None]:
        """Answer while the context is open."""
        async with AsyncExitStack() as stack:
            for service, ensure in (("imaged", self._image), ("netd", self._net)):
                endpoints = [
                    Endpoint(
                        f"{service}-ensure", subjects.rpc(self._node, service, "ensure"), ensure
                    ),
                    Endpoint(
                        f"{service}-release",
                        subjects.rpc(self._node, service, "release"),
                        self._release,
                    ),
                ]
                info = ServiceInfo(f"virtbus-{service}", "0.1.0", "simulated", {"node": self._node})
                await stack.enter_async_context(self._bus.serve(info, endpoints))
            yield

    async def _image(self, request: Request) -> ImageReady:
        record = validate(Ensure, request.data).record
        self.held[record.uid] = record.epoch
        disks = {
            volume.name: DiskFile(
                path=f"/simulated/{record.uid}/{volume.name}.qcow2",
                format=ImageFormat.QCOW2,
                virtual_size_bytes=0,
            )
            for volume in record.spec.volumes
            if volume.cloud_init_no_cloud is None
        }
        return ImageReady(uid=record.uid, epoch=record.epoch, disks=disks)

    async def _net(self, request: Request) -> NetReady:
        record = validate(Ensure, request.data).record
        return NetReady(
            uid=record.uid,
            epoch=record.epoch,
            phase=NetPhase.READY,
            interfaces=tuple(_interface(record, i) for i in range(_count(record))),
        )

    async def _release(self, request: Request) -> Released:
        uid = validate(Release, request.data).uid
        self.held.pop(uid, None)
        return Released(uid=uid)

    async def answers(self, uid: str, interfaces: Callable[[], Sequence[InterfaceStatus]]) -> str:
        """A simulated guest is ready when it runs."""
        del uid, interfaces
        return "Simulated"

    async def arm(self, arm: Arm) -> None:
        self.armed.append(arm.uid)


def _count(record: VmRecord) -> int:
    return len(record.spec.domain.devices.interfaces)


def _interface(record: VmRecord, index: int) -> InterfaceStatus:
    nic = record.spec.domain.devices.interfaces[index]
    octets = hashlib.sha256(f"{record.uid}/{index}".encode()).digest()
    mac = nic.mac_address or "02:" + ":".join(f"{octet:02x}" for octet in octets[:5])
    address = f"10.{octets[5]}.{octets[6]}.{octets[7] % 254 + 1}/8"
    return InterfaceStatus(name=nic.name, mac=mac, addresses=(address,))
