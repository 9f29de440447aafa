"""Serves two unix sockets: one where the agent arms starts, one where vmwrapper fetches taps.

To arm a start is to grant one fetch of the VM's descriptors. The module reads by plain `recv`,
without space for control data. The kernel therefore closes descriptors that a peer attaches, and
they never enter this process (FDS-06).
"""

import asyncio
import itertools
import logging
import os
import socket
import struct
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from virtbus.netd.core import peer
from virtbus.netd.core.attachment import Attachment
from virtbus.netd.core.fd_grants import FdGrants
from virtbus.netd.core.wrapper_frame import (
    MAX_FRAME_BYTES,
    FrameError,
    NicArgument,
    WrapperRequest,
    frame_length,
    grant,
    read_request,
    refusal,
)
from virtbus.netd.edge.guest_links import close_all
from virtbus.netd.edge.vhost import accelerated
from virtbus.netd.edge.whole_file import content
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.node_rpc import Arm, Armed, NetPhase, NetReady
from virtbus.schemas.wire import encode, read

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 256
SHARE = 4
"""Maximum connections to the wrapper's socket from one user in one libvirt machine, or from root
outside of all machines.
"""
SHARE_OF_USER = 192
"""Maximum connections from one user of the host. SHARE does not bound a user, who can name cgroups
after many machines.
"""
BATCH = 16
"""Connections to accept before other tasks of the event loop run."""
READ_TIMEOUT_S = 2.0
NETWORK_TIMEOUT_S = 5.0
"""Time that a wrapper waits for an unfinished network. libvirt's start of the VM waits, too."""

_CREDENTIALS = struct.Struct("3i")


class Taps(Protocol):
    """The part of `Attachments` that the hand-over needs."""

    recovering: bool

    def state_of(self, uid: str) -> NetReady | None: ...

    async def take_taps(self, uid: str, timeout_s: float) -> tuple[Attachment, list[int]]: ...


@dataclass(frozen=True, slots=True)
class Handover:
    """A granted fetch. Times are CLOCK_MONOTONIC ns; vmwrapper measured the first two."""

    uid: str
    epoch: int
    traceparent: str | None
    entered_ns: int
    connected_ns: int
    asked_ns: int
    granted_ns: int


class HandoverServer:
    """Serves both sockets until `run` is cancelled."""

    def __init__(
        self,
        directory: Path,
        taps: Taps,
        emulator: str,
        on_handover: Callable[[Handover], None],
        *,
        read_peer: Callable[[int], tuple[bytes, str]] | None = None,
    ) -> None:
        """`read_peer` returns the cmdline and the cgroups of a pid; by default from /proc."""
        self.admin_path = directory / "admin.sock"
        self.wrapper_path = directory / "wrapper.sock"
        self._taps = taps
        self._emulator = emulator
        self._on_handover = on_handover
        self._read_peer = read_peer or _from_proc
        self._arms = FdGrants()

    async def run(self) -> None:
        directory = self.admin_path.parent
        directory.mkdir(parents=True, exist_ok=True)
        # vmwrapper runs as the emulator's user: it may reach its socket, but not list the folder.
        directory.chmod(0o711)
        directory.parent.chmod(directory.parent.stat().st_mode | 0o011)
        admin, wrapper = _bound(self.admin_path, 0o600), _bound(self.wrapper_path, 0o666)
        try:
            async with asyncio.TaskGroup() as group:
                of_agent = _Door(self._admin, _root, share=MAX_CONNECTIONS)
                of_wrappers = _Door(self._wrapper, self._owner, share=SHARE)
                group.create_task(of_agent.serve(admin, group))
                group.create_task(of_wrappers.serve(wrapper, group))
        finally:
            admin.close()
            wrapper.close()
            self.admin_path.unlink(missing_ok=True)
            self.wrapper_path.unlink(missing_ok=True)

    async def _admin(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while (header := await _exactly(connection, 4)) != b"":
            body = await _within(_exactly(connection, frame_length(header)))
            try:
                arm = read(Arm, body)
                self._check(arm)
                self._arms.put(arm, loop.time())
                armed = Armed(uid=arm.uid)
            except VirtbusError as error:
                armed = Armed(uid="", error=error.body)
            answer = encode(armed)
            await loop.sock_sendall(connection, len(answer).to_bytes(4, "big") + answer)

    def _check(self, arm: Arm) -> None:
        """Raise VirtbusError if the VM has no network that its wrapper may fetch."""
        state = self._taps.state_of(arm.uid)
        if self._taps.recovering:
            message = "netd is comparing its state; arm again in a second"
            raise VirtbusError(Code.UNAVAILABLE, "recovering", message)
        failed = state is None or state.phase is NetPhase.FAILED
        if state is not None and failed and state.error is not None:
            raise VirtbusError.of(state.error)
        if state is None or failed:
            message = f"netd has no network of VM {arm.uid}; ask rpc.netd.ensure"
            raise VirtbusError(Code.NOT_FOUND, "not_attached", message)
        if arm.epoch != state.epoch:
            message = (
                f"netd holds epoch {state.epoch} of VM {arm.uid}, not {arm.epoch}; ensure it first"
            )
            raise VirtbusError(Code.CONFLICT, "stale_epoch", message)

    def _owner(self, connection: socket.socket) -> "_Owner | None":
        """Return the peer's user and libvirt machine.

        Without a machine, only root is an owner.
        """
        # libvirt runs an emulator inside its machine's cgroup, and the emulator cannot leave it.
        pid, user = _peer(connection)
        try:
            machine = peer.machine_of(self._read_peer(pid)[1])
        except OSError:  # the peer has ended
            machine = ""
        return _Owner(machine, user) if machine or user == 0 else None

    async def _wrapper(self, connection: socket.socket) -> None:
        header = await _within(_exactly(connection, 4))
        request = read_request(await _within(_exactly(connection, frame_length(header))))
        asked_ns = time.monotonic_ns()
        try:
            arm = self._admit(connection, request)
            await self._grant(connection, request, arm, asked_ns)
        except VirtbusError as error:
            extra = {"code": error.reason, "uid": request.uid}
            log.warning("refused a wrapper: %s", error, extra=extra)
            connection.send(refusal(error.reason, str(error)))

    def _admit(self, connection: socket.socket, request: WrapperRequest) -> Arm:
        """Consume and return the grant for this peer."""
        arm = self._arms.peek(request.uid, asyncio.get_running_loop().time())
        if arm is None:
            message = "no start of this VM is under way; start it with `virtbus vm start`"
            raise VirtbusError(Code.DENIED, "not_armed", message)
        pid, _uid = _peer(connection)
        try:
            cmdline, cgroups = self._read_peer(pid)
        except OSError:
            cmdline, cgroups = b"", ""
        if not peer.asks_for(cmdline, arm.uid) or not peer.in_domain_cgroup(
            cgroups, arm.domain_name
        ):
            raise VirtbusError(
                Code.DENIED,
                "denied",
                f"process {pid} is not the emulator of {arm.domain_name}; only libvirt may run it",
            )
        self._arms.use(arm.uid)
        return arm

    async def _grant(
        self, connection: socket.socket, request: WrapperRequest, arm: Arm, asked_ns: int
    ) -> None:
        attachment, taps = await self._taps.take_taps(arm.uid, NETWORK_TIMEOUT_S)
        vhosts: list[int] = []
        try:
            nics, vhosts = accelerated(_nics(arm, attachment))
            answer = grant(self._emulator, nics, attachment.firmware_uuid)
            _send(connection, answer, [*taps, *vhosts])
        except FrameError as error:
            raise VirtbusError(Code.INVALID, "bad_device", str(error)) from error
        finally:
            close_all([*taps, *vhosts])
        entered_ns, connected_ns = (*request.times_ns, 0, 0)[:2]
        self._on_handover(
            Handover(
                uid=arm.uid,
                epoch=arm.epoch,
                traceparent=arm.traceparent,
                entered_ns=entered_ns,
                connected_ns=connected_ns,
                asked_ns=asked_ns,
                granted_ns=time.monotonic_ns(),
            )
        )


def _nics(arm: Arm, attachment: Attachment) -> list[NicArgument]:
    """Combine the grant's devices with the attached interfaces."""
    attached = [nic.mac for nic in attachment.nics]
    if [nic.mac for nic in arm.nics] != attached:
        raise VirtbusError(
            Code.CONFLICT,
            "mac_mismatch",
            f"the domain has the MACs {[nic.mac for nic in arm.nics]}, attached are {attached}; "
            "define the domain again",
        )
    return [
        NicArgument(device.device, nic.mac, nic.queues)
        for nic, device in zip(attachment.nics, arm.nics, strict=True)
    ]


def _send(connection: socket.socket, answer: bytes, descriptors: list[int]) -> None:
    """Send answer and descriptors in one message, so that a peer gets both or neither."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MAX_FRAME_BYTES)
    if descriptors:
        sent = socket.send_fds(connection, [answer], descriptors)
    else:
        sent = connection.send(answer)
    if sent != len(answer):
        msg = f"only {sent} of {len(answer)} bytes were taken"
        raise OSError(msg)


def _peer(connection: socket.socket) -> tuple[int, int]:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _gid = _CREDENTIALS.unpack(raw)
    return pid, uid


def _from_proc(pid: int) -> tuple[bytes, str]:
    # Any user can create a cgroup whose name is not UTF-8.
    cgroups = content(f"/proc/{pid}/cgroup").decode(errors="replace")
    return content(f"/proc/{pid}/cmdline"), cgroups


def _root(connection: socket.socket) -> "_Owner | None":
    return _Owner("", 0) if _peer(connection)[1] == 0 else None


def _bound(path: Path, mode: int) -> socket.socket:
    """Return a listening socket. `path` never has wider permissions than `mode`."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        part = path.with_suffix(".part")
        part.unlink(missing_ok=True)
        mask = os.umask(0o777)
        try:
            listener.bind(str(part))
        finally:
            os.umask(mask)
        part.chmod(mode)
        listener.listen(128)
        listener.setblocking(False)
        part.rename(path)
    except BaseException:
        listener.close()
        raise
    return listener


class _Owner(NamedTuple):
    """The owner of a connection. `machine` is the peer's libvirt machine, or empty."""

    machine: str
    user: int


class _Door:
    """A listening socket with limits.

    It closes a connection before reading if the connection has no owner, or exceeds a limit: the
    `share` of its owner, SHARE_OF_USER or MAX_CONNECTIONS.
    """

    def __init__(
        self,
        handle: Callable[[socket.socket], Awaitable[None]],
        owner: Callable[[socket.socket], _Owner | None],
        *,
        share: int,
    ) -> None:
        self._handle = handle
        self._owner = owner
        self._share = share
        self._open: Counter[_Owner] = Counter()

    async def serve(self, listener: socket.socket, group: asyncio.TaskGroup) -> None:
        loop = asyncio.get_running_loop()
        for turn in itertools.count(1):
            try:
                connection, _address = await loop.sock_accept(listener)
            except OSError as error:
                # Probably out of descriptors: wait until some are closed, to avoid a busy loop
                # (FDS-10).
                log.warning("cannot accept: %s", error, extra={"code": "accept_failed"})
                await asyncio.sleep(0.1)
                continue
            owner = self._taken(connection)
            if owner is None:
                connection.close()
            else:
                group.create_task(self._one(connection, owner))
            if turn % BATCH == 0:  # sock_accept does not yield while connections wait
                await asyncio.sleep(0)

    async def _one(self, connection: socket.socket, owner: _Owner) -> None:
        try:
            await self._handle(connection)
        except (OSError, FrameError, TimeoutError) as error:
            log.info("closed a connection: %s", error, extra={"code": "connection_closed"})
        except Exception:
            log.exception("closed a connection", extra={"code": "connection_failed"})
        finally:
            self._open[owner] -= 1
            if self._open[owner] <= 0:
                del self._open[owner]
            connection.close()

    def _taken(self, connection: socket.socket) -> _Owner | None:
        """Count a connection for its owner, and return the owner; None for a refusal."""
        try:
            owner = self._owner(connection)
        except Exception:
            log.exception("closed a connection", extra={"code": "connection_failed"})
            return None
        if owner is None or self._open[owner] >= self._share:
            return None
        users = sum(count for held, count in self._open.items() if held.user == owner.user)
        if users >= SHARE_OF_USER or self._open.total() >= MAX_CONNECTIONS:
            return None
        self._open[owner] += 1
        return owner


async def _within(reading: Awaitable[bytes]) -> bytes:
    """Read within READ_TIMEOUT_S.

    Raises:
        TimeoutError: nothing was read in time.
        FrameError: the peer closed the connection.
    """
    async with asyncio.timeout(READ_TIMEOUT_S):
        read_bytes = await reading
    if not read_bytes:
        msg = "the peer closed the connection"
        raise FrameError(msg)
    return read_bytes


async def _exactly(connection: socket.socket, count: int) -> bytes:
    """Return `count` bytes; empty if the peer closed before the first byte.

    Raises:
        FrameError: the peer closed in the middle.
    """
    loop = asyncio.get_running_loop()
    found = b""
    while len(found) < count:
        part = await loop.sock_recv(connection, count - len(found))
        if not part and found:
            msg = f"half a frame: {len(found)} of {count} bytes"
            raise FrameError(msg)
        if not part:
            return b""
        found += part
    return found
