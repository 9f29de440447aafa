"""Chooses the `Server` of a pool. Each kind of pool has a module in this package (ADR 0060)."""

from typing import Any

from virtbus.bus.runtime.pool_settings import IscsiPool, NbdPool, NfsPool, RbdPool, ServerPool
from virtbus.nodeagent.core.servers.iscsi import IscsiServer
from virtbus.nodeagent.core.servers.nbd import NbdServer
from virtbus.nodeagent.core.servers.nfs import NfsServer
from virtbus.nodeagent.core.servers.port import Server
from virtbus.nodeagent.core.servers.rbd import RbdServer


def server_of(pool: ServerPool) -> Server[Any]:
    """Return the server of a pool."""
    match pool:
        case NbdPool():
            return NbdServer(pool)
        case IscsiPool():
            return IscsiServer(pool)
        case RbdPool():
            return RbdServer(pool)
        case NfsPool():
            return NfsServer(pool)
