"""Defines the port that lends the logins of disks to the hypervisor."""

from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

from virtbus.nodeagent.core.disk_sources import DiskSource
from virtbus.nodeagent.core.servers.port import Login


class Logins(Protocol):
    """Lends the logins of disks at their servers."""

    def lent(self, logins: Iterable[Login]) -> AbstractAsyncContextManager[None]:
        """Let the hypervisor use logins only within the context.

        A running guest keeps its logins. Raises VirtbusError 409 `login_unreadable`.
        """


class NoLogins:
    """The `Logins` port for simulated guests, whose disks have no login."""

    @asynccontextmanager
    async def lent(self, _logins: Iterable[Login]) -> AsyncIterator[None]:
        yield


def logins_of(disks: Mapping[str, DiskSource]) -> list[Login]:
    """Return the logins of disks."""
    networks = (disk.network for disk in disks.values())
    return [one.login for one in networks if one is not None and one.login is not None]
