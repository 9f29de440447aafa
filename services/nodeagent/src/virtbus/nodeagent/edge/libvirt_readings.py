"""Implements the `GuestReadPort` with libvirt, and without a hypervisor for simulated guests.

During a reading, the QEMU of a running guest serves the disks as they were at one instant, by NBD
on a UNIX socket. QEMU makes the socket itself (ADR 0079), so QEMU's user must be able to write to
the socket's folder. An access control list gives this right, because the agent may not change a
folder's owner. A guest that took over its QEMU may replace the socket. So the agent connects only
to a socket that QEMU's user owns.
"""

import asyncio
import contextlib
import os
import re
import shutil
import socket
import stat
import struct
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import libvirt

from virtbus.bus.client.streams import carry
from virtbus.nodeagent.core.guest_backups import (
    Reading,
    checkpoint_xml,
    reading_xml,
    served_socket,
)
from virtbus.nodeagent.edge import qemu_monitor
from virtbus.nodeagent.edge.atomic_file import in_thread
from virtbus.nodeagent.edge.guest_connections import close
from virtbus.nodeagent.edge.libvirt_backups import BEGIN_S, simulated
from virtbus.nodeagent.edge.libvirt_domains import on_ours
from virtbus.nodeagent.edge.libvirt_links import LibvirtLinks
from virtbus.nodeagent.streams import Carry
from virtbus.schemas.backup import READ_BITMAP
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.ids import check_uid

ASK_S = 45.0
"""Time limit of a call that does not begin a reading. libvirt waits up to 30 s for a domain's job
lock."""
ENDED_S = 20.0
LOOK_S = 0.05
CONNECT_S = 5.0
FOLDER = "nbd"
_LABEL = re.compile(r"\+(\d+):\+\d+")
"""libvirt's security label with the user and the group of a QEMU."""
_ACL, _VERSION, _ENTRY = "system.posix_acl_access", struct.pack("<I", 2), struct.Struct("<HHI")
_OWNER, _USER, _GROUP, _MASK, _OTHER = 1, 2, 4, 0x10, 0x20
"""The layout and the tags of an access control list (linux/posix_acl_xattr.h)."""
_ALL, _SEARCH = 7, 1


class LibvirtReadings:
    """The `GuestReadPort` on libvirt."""

    def __init__(self, links: LibvirtLinks, run_dir: Path) -> None:
        self._links = links
        self._vms = run_dir / "vms"

    def _folder(self, uid: str) -> Path:
        return self._vms / check_uid(uid) / FOLDER

    def _socket(self, uid: str, reading: str) -> Path:
        """Return the path of a reading's socket.

        Its name is only the end of the reading's id, because a socket's path has at most 107 bytes.
        """
        return self._folder(uid) / f"{check_uid(reading)[-12:]}.sock"

    async def begin(self, uid: str, reading: Reading) -> None:
        path = self._socket(uid, reading.id)

        def run(domain: libvirt.virDomain) -> None:
            _make(path.parent, _user_of(domain))
            _drop_useless(domain)
            xml = domain.XMLDesc()
            domain.backupBegin(
                reading_xml(xml, reading.files, reading.exports, reading.since, str(path)),
                checkpoint_xml(xml, reading.files, reading.bitmap, reading.about),
                libvirt.VIR_DOMAIN_BACKUP_BEGIN_REUSE_EXTERNAL,
            )

        await on_ours(self._links, uid, run, "serve the disks", timeout_s=BEGIN_S)

    async def served(self, uid: str, reading: str) -> bool:
        path = str(self._socket(uid, reading))

        def run(domain: libvirt.virDomain) -> bool:
            return _served(domain) == path

        asked = on_ours(self._links, uid, run, "read what QEMU serves", timeout_s=ASK_S)
        return await asked or False

    @contextlib.asynccontextmanager
    async def connected(self, uid: str, reading: str) -> AsyncIterator[Carry]:
        path = self._socket(uid, reading)
        made = await in_thread(lambda: _connected(path))
        try:
            reader, writer = await asyncio.open_unix_connection(sock=made)
        except BaseException:
            made.close()
            raise
        try:
            yield partial(carry, reader=reader, writer=writer)
        finally:
            await close(writer)

    async def end(self, uid: str, reading: str = "", *, off: bool = False) -> bool:
        only = str(self._socket(uid, reading)) if reading else ""

        def run(domain: libvirt.virDomain) -> bool:
            """Return True once QEMU serves no disks; False if QEMU serves another reading."""
            until_s = time.monotonic() + ENDED_S
            if only and _served(domain) not in {"", only}:
                return False
            if _served(domain):
                domain.abortJob()
            while _served(domain):
                if time.monotonic() > until_s:
                    message = "QEMU still serves the disks; the agent asks again"
                    raise VirtbusError(Code.UNAVAILABLE, "domain_busy", message)
                time.sleep(LOOK_S)
            return True

        doing = "end the server of the disks"
        idle = await on_ours(self._links, uid, run, doing, timeout_s=ASK_S)
        if idle or (idle is None and off):
            folder = self._folder(uid)
            await in_thread(lambda: _clear(folder))
        return off or idle is not None


def _drop_useless(domain: libvirt.virDomain) -> None:
    """Remove the readings' bitmaps without a checkpoint in libvirt, which no reading can use."""
    known = {one.getName() for one in domain.listAllCheckpoints()}
    qemu_monitor.remove_bitmaps(
        domain, lambda name: name.startswith(READ_BITMAP) and name not in known
    )


def _served(domain: libvirt.virDomain) -> str:
    """Return the path of the socket on which QEMU serves disks; "" if QEMU serves none."""
    try:
        return served_socket(domain.backupGetXMLDesc()) if domain.isActive() else ""
    except libvirt.libvirtError as error:
        if error.get_error_code() == libvirt.VIR_ERR_NO_DOMAIN_BACKUP:
            return ""
        raise


def _user_of(domain: libvirt.virDomain) -> int:
    """Return the user id of a running QEMU; raise VirtbusError 422 `qemu_user_unknown`."""
    for label, *_ in domain.securityLabelList():
        if found := _LABEL.fullmatch(label):
            return int(found[1])
    message = "libvirt does not say which user its QEMU has; see security_driver in its qemu.conf"
    raise VirtbusError(Code.UNSUPPORTED, "qemu_user_unknown", message)


def _make(folder: Path, user: int) -> None:
    """Make an empty folder for QEMU's socket. Only root and QEMU's user may enter it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(mode=0o711, parents=True, exist_ok=True)
    folder.mkdir(mode=0o700)
    _permit(folder.parent, user, _SEARCH)
    _permit(folder, user, _ALL)


def _permit(folder: Path, user: int, rights: int) -> None:
    nobody = 0xFFFF_FFFF
    entries = (
        (_OWNER, _ALL, nobody),
        (_USER, rights, user),
        (_GROUP, 0, nobody),
        (_MASK, rights, nobody),
        (_OTHER, 0, nobody),
    )
    os.setxattr(folder, _ACL, _VERSION + b"".join(_ENTRY.pack(*one) for one in entries))


def _clear(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):  # there is no access control list
        os.removexattr(folder.parent, _ACL)


def _allowed(folder: Path) -> int:
    """Return the id of the user to whom `_make` gave rights on the folder."""
    entries = os.getxattr(folder, _ACL)[len(_VERSION) :]
    found = {tag: user for tag, _, user in _ENTRY.iter_unpack(entries)}
    return int(found[_USER])


def _connected(path: Path) -> socket.socket:
    """Connect to the socket at `path`; raise 409 `not_served` if QEMU's user does not own it."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    with contextlib.ExitStack() as undo:
        undo.callback(made.close)
        try:
            descriptor = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
            undo.callback(os.close, descriptor)
            found = os.fstat(descriptor)
            ours = stat.S_ISSOCK(found.st_mode) and found.st_uid == _allowed(path.parent)
            if not ours:
                raise not_served()
            made.settimeout(CONNECT_S)
            made.connect(f"/proc/self/fd/{descriptor}")
        except OSError as error:
            raise not_served() from error
        made.setblocking(False)
        undo.pop_all()
        os.close(descriptor)
    return made


def not_served() -> VirtbusError:
    """Return 409 `not_served`: QEMU serves no disks of this reading."""
    message = "nobody serves the disks now; `virtbus operation get` shows the state of the reading"
    return VirtbusError(Code.CONFLICT, "not_served", message)


class NoReadings:
    """The `GuestReadPort` for simulated guests, which have no disks."""

    async def begin(self, uid: str, reading: Reading) -> None:
        raise simulated()

    async def served(self, uid: str, reading: str) -> bool:
        return False

    def connected(self, uid: str, reading: str) -> contextlib.AbstractAsyncContextManager[Carry]:
        raise simulated()

    async def end(self, uid: str, reading: str = "", *, off: bool = False) -> bool:
        return True
