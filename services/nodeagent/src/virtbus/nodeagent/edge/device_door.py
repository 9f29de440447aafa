"""Opens devices of the node's pools for imaged, which has no rights to devices (ADR 0060).

A request names a pool and a volume, or a path. The path's device must be in the setting
`devices_allowed`, and a VM of this node must have the device as a volume that begins with an image.
The answer has the open device, or the reason of a refusal. Only root and the owner of the disks'
folder are served. A request with `do` is for a logical volume: the agent also makes, grows, marks
and removes these. A request with `clear` asks if a volume's content may be removed.
"""

import asyncio
import errno
import json
import os
import socket
import stat
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path

from virtbus.bus.client.accept_loop import accepted
from virtbus.bus.runtime.device_socket import (
    FULL,
    GRANTED,
    GROUP_S,
    MAX_BYTES,
    REFUSED,
    LogicalRequest,
)
from virtbus.bus.runtime.pool_settings import BlockPool, PoolSettings
from virtbus.nodeagent.edge.allowed_devices import allowed_device
from virtbus.nodeagent.edge.atomic_file import in_thread
from virtbus.nodeagent.edge.volume_groups import VolumeGroup
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.wire import encode_json, validate

TIMEOUT_S, APPEARS_S, RECORD_S = 5.0, 0.5, 2.0
_PEER = struct.Struct("3i")
_REASONS = OSError, ValueError, KeyError, TypeError, TimeoutError, RecursionError, VirtbusError
Held = Callable[[], Mapping[tuple[str, str], str]]
_NO_GROUPS: Mapping[str, VolumeGroup] = {}


class DeviceDoor:
    """Answers imaged's requests on a UNIX socket."""

    def __init__(
        self,
        path: Path,
        disks: Path,
        pools: Mapping[str, PoolSettings],
        devices_allowed: Sequence[str] = (),
        wanted: Callable[[], Collection[str]] = tuple,
        groups: Mapping[str, VolumeGroup] = _NO_GROUPS,
    ) -> None:
        """`wanted` returns the paths of devices on which this node's VMs have an image."""
        self._path = path
        self._disks = disks
        self._pools = {name: one for name, one in pools.items() if isinstance(one, BlockPool)}
        self._devices_allowed = devices_allowed
        self._wanted = wanted
        self._groups = groups
        self._held: Held = dict

    async def serve(self, held: Held = dict) -> None:
        """Serve until cancelled.

        Return at once on a node without pools of devices, volume groups and allowed devices. `held`
        returns the names of this node's VMs, by pool and folder of their volumes.
        """
        self._held = held
        if not (self._pools or self._devices_allowed or self._groups):
            return
        self._path.unlink(missing_ok=True)
        with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as listening:
            listening.setblocking(False)
            listening.bind(str(self._path))
            self._path.chmod(0o600)
            listening.listen()
            try:
                imaged = await self._imaged()
                os.chown(self._path, imaged.st_uid, imaged.st_gid)
                async with asyncio.TaskGroup() as group:
                    while True:
                        peer, _ = await accepted(listening)
                        group.create_task(self._answer(peer))
            finally:
                self._path.unlink(missing_ok=True)

    async def _imaged(self) -> os.stat_result:
        """Wait for the folder that imaged makes at its first start. Return the folder's `stat`."""
        while True:
            try:
                return self._disks.stat()
            except FileNotFoundError:
                await asyncio.sleep(APPEARS_S)

    async def _answer(self, peer: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        devices: list[int] = []
        with closing(peer), suppress(OSError):  # the peer may have gone
            try:
                async with asyncio.timeout(TIMEOUT_S) as limit:
                    want = json.loads(await loop.sock_recv(peer, MAX_BYTES))
                    if "do" in want:
                        limit.reschedule(loop.time() + GROUP_S)
                        told = await self._logical(peer, validate(LogicalRequest, want), devices)
                    elif "clear" in want:
                        await in_thread(lambda: self._check_peer(peer))
                        told = self._refuse_held(str(want["pool"]), str(want["clear"]))
                    else:
                        if "device" in want:
                            await self._until_wanted(str(want["device"]))
                        await in_thread(lambda: devices.append(self._opened(peer, want)))
                        told = b""
                socket.send_fds(peer, [GRANTED], devices)
                await loop.sock_sendall(peer, told)
            except _REASONS as error:
                why = getattr(error, "strerror", None) or str(error) or "it does not answer"
                text = why.encode(errors="replace")[: MAX_BYTES - 1]
                full = isinstance(error, OSError) and error.errno == errno.ENOSPC
                await loop.sock_sendall(peer, (FULL if full else REFUSED) + text)
            finally:
                for device in devices:
                    os.close(device)

    def _refuse_held(self, pool: str, folder: str) -> bytes:
        """Raise ValueError if a VM has the volume, because its guest may run."""
        if vm := self._held().get((pool, folder)):
            msg = f"the VM {vm} of this node has it"
            raise ValueError(msg)
        return b""

    async def _until_wanted(self, device: str) -> None:
        """Wait until a VM has an image on the device, because imaged may get the record first.

        Raises:
            ValueError: no VM has an image on the device after 2 s.
        """
        until_s = asyncio.get_running_loop().time() + RECORD_S
        while device not in self._wanted():
            if asyncio.get_running_loop().time() > until_s:
                msg = f"no VM that this agent follows has the device {device} with an image"
                raise ValueError(msg)
            await asyncio.sleep(RECORD_S / 40)

    async def _logical(
        self, peer: socket.socket, want: LogicalRequest, devices: list[int]
    ) -> bytes:
        """Carry out a request for a logical volume. Return the encoded answer.

        Append an opened device to `devices`.
        """
        await in_thread(lambda: self._check_peer(peer))
        group = self._groups.get(want.pool)
        if group is None:
            msg = f"this node has no pool {want.pool} of the kind lvm (pools.toml)"
            raise ValueError(msg)
        answer, device = await group.do(want)
        if device is not None:
            devices.append(device)
        return encode_json(answer)

    def _check_peer(self, peer: socket.socket) -> None:
        size = _PEER.size
        _, user, _ = _PEER.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
        if user not in {0, self._disks.stat().st_uid}:
            msg = "only imaged may open devices"
            raise ValueError(msg)

    def _opened(self, peer: socket.socket, want: dict[str, str]) -> int:
        """Raises OSError, ValueError, KeyError, TypeError."""
        self._check_peer(peer)
        if "device" in want:
            path = allowed_device(str(want["device"]), self._devices_allowed)
        else:
            path = self._assigned(want["pool"], want["volume"])
        device = os.open(path, os.O_RDWR | os.O_EXCL | os.O_CLOEXEC)
        if not stat.S_ISBLK(os.fstat(device).st_mode):
            os.close(device)
            msg = f"{path} is no block device"
            raise ValueError(msg)
        return device

    def _assigned(self, name: str, volume: str) -> str:
        """Return the path of a volume in a pool. Raises ValueError."""
        pool = self._pools.get(name)
        if pool is None or volume not in pool.volumes:
            msg = f"the pool {name} of this node has nothing for {volume} (pools.toml)"
            raise ValueError(msg)
        return pool.volumes[volume]
