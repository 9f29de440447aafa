"""Lends logins of pools' servers to libvirt while a guest is started, or a disk is plugged.

A login becomes a secret of libvirt, which libvirt passes to QEMU encrypted. libvirt keeps these
secrets in its memory only (`ephemeral`), and never returns their values (`private`). The UUID of a
secret is the volume's; for a shared volume, each pair of VM and volume has a UUID. So the next
start of the VM replaces a secret that a dead agent left. A sweep removes the rest of such secrets.
"""

import asyncio
import base64
import binascii
import contextlib
import logging
import os
import stat
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from functools import partial

import libvirt

from virtbus.nodeagent.core.element import el, to_text
from virtbus.nodeagent.core.servers.port import Login
from virtbus.nodeagent.edge.atomic_file import in_thread
from virtbus.nodeagent.edge.libvirt_links import LibvirtLinks
from virtbus.schemas.errors import Code, VirtbusError

log = logging.getLogger(__name__)

TIMEOUT_S = 15.0
AGAIN_S = 60.0
"""Delay until the next try after a failed sweep."""
PREFIX = "virtbus login "
"""Start of the usage text of each secret of virtbus in libvirt. The secret's UUID follows it."""
_USAGE = {"iscsi": "target", "ceph": "name"}
"""Name of the XML element for the usage text, by type of secret."""
_MAX_BYTES = 4096


class LibvirtLogins:
    """The `Logins` port, on connections of `links`."""

    def __init__(self, links: LibvirtLinks) -> None:
        self._links = links
        self._lent: set[str] = set()

    @asynccontextmanager
    async def lent(self, logins: Iterable[Login]) -> AsyncIterator[None]:
        held = tuple(logins)
        if not held:
            yield
            return
        values = await in_thread(lambda: [(login, read_secret(login)) for login in held])

        def lend(connection: libvirt.virConnect) -> None:
            for login, value in values:
                secret = connection.secretDefineXML(_xml(login))
                secret.setValue(value)

        ids = {login.id for login in held}
        self._lent |= ids
        try:
            await self._links.run(lend, "lend the login of a disk", timeout_s=TIMEOUT_S)
            yield
        finally:
            self._lent -= ids
            await self._remove(ids.__contains__)

    async def sweep(self) -> None:
        """Remove the secrets that an earlier agent left. Repeat until libvirt answers."""
        while True:
            if await self._remove(lambda id_: id_ not in self._lent):
                return
            await asyncio.sleep(AGAIN_S)

    async def _remove(self, goes: Callable[[str], bool]) -> bool:
        run = partial(_removed, goes=goes)
        try:
            await self._links.run(run, "remove the login of a disk", timeout_s=TIMEOUT_S)
        except VirtbusError as error:  # a libvirtd that is down has forgotten its secrets
            extra = {"code": "login_left"}
            log.warning("libvirt may still have a login, until it restarts: %s", error, extra=extra)
            return False
        return True


def _xml(login: Login) -> str:
    usage = el(_USAGE[login.kind], f"{PREFIX}{login.id}")
    parts = el("uuid", login.id), el("usage", usage, type=login.kind)
    return to_text(el("secret", *parts, ephemeral="yes", private="yes"))


def _removed(connection: libvirt.virConnect, *, goes: Callable[[str], bool]) -> None:
    for secret in connection.listAllSecrets():
        ours = secret.usageID().startswith(PREFIX)
        if ours and goes(secret.UUIDString()):
            with contextlib.suppress(libvirt.libvirtError):  # another call has removed it
                secret.undefine()


def read_secret(login: Login) -> bytes:
    """Return the secret of a login. Blocks.

    Raises:
        VirtbusError: 409 `login_unreadable`: the file cannot be read, is not regular, gives rights
            to group or others, is empty, or has no valid key of Ceph.
    """
    try:
        descriptor = os.open(login.secret_file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise _unreadable(login, f"{error.strerror}; write the secret to it") from error
    with os.fdopen(descriptor, "rb") as file:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode) or mode & 0o077:
            raise _unreadable(login, "it must be a file of root with mode 0600")
        value = file.read(_MAX_BYTES).strip()
    if not value:
        raise _unreadable(login, "it is empty; write the secret to it")
    if login.kind != "ceph":
        return value
    try:
        return base64.b64decode(value, validate=True)
    except binascii.Error:
        why = "it must have a key of Ceph only, as `ceph auth get-key` prints it"
        raise _unreadable(login, why) from None


def _unreadable(login: Login, why: str) -> VirtbusError:
    message = f"the login of a disk is not readable: {login.secret_file}: {why}"
    return VirtbusError(Code.CONFLICT, "login_unreadable", message)
