"""The message bus of an installation: nats-server, what virtbus declares on it, its nodes.

`virtbus up` does the same inside itself; this is `virtbus-nats` for systemd and compose.
Credentials are written to run_dir for the services of this host; a further host gets its file
(`node-<id>.creds`) by hand, with the url that reaches here.
"""

import asyncio
import logging
import os
import secrets
import sys
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from virtbus.bus.client import connection
from virtbus.bus.errors import BusError
from virtbus.bus.provisioning import server, stream_setup
from virtbus.bus.runtime import process
from virtbus.bus.runtime.settings import ServiceSettings, load
from virtbus.cli.up.bus_disk import BusDisk
from virtbus.schemas import wire
from virtbus.schemas.ids import Id
from virtbus.schemas.vm import JoinNonce

log = logging.getLogger("virtbus.nats")


class Settings(ServiceSettings):
    """Settings of `virtbus-nats`."""

    service: ClassVar[str] = "nats"

    host: str = Field("127.0.0.1", description="address to listen on; 0.0.0.0 for other hosts")
    port: int = Field(4222, ge=1, le=65535, description="port to listen on")
    nodes: list[Id] = Field(
        default_factory=list, description="ids of further nodes; this host's own is always one"
    )


class Journal:
    """Lines for people as log records."""

    def say(self, text: str, level: str = "INFO") -> None:
        log.log(logging.getLevelNamesMapping()[level], "%s", text, extra={"code": "bus_disk"})


def link_own(files: server.ServerFiles, node: str) -> None:
    """Give this node's credentials names that units can know: `node.creds` and two more."""
    for service in ("imaged", "netd", "node"):
        name = files.run_dir / f"{service}.creds"
        fresh = name.with_suffix(".new")
        with suppress(FileNotFoundError):
            fresh.unlink()
        fresh.symlink_to(Path(f"{service}-{node}.creds"))
        fresh.rename(name)


def hand_out(files: server.ServerFiles, node: str) -> None:
    """Give each service its credentials, and only those, where folders for that exist.

    Compose mounts `creds/<service>` into the service's container; the folder's group may read it.
    """
    users = {"controller": "controller", "nodeagent": f"node-{node}"}
    users |= {service: f"{service}-{node}" for service in ("imaged", "netd")}
    for service, user in users.items():
        folder = files.run_dir / "creds" / service
        if not folder.is_dir():
            continue
        fresh = folder / "bus.new"
        fresh.unlink(missing_ok=True)
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as out:
            out.write(files.creds(user).read_bytes())
            os.fchown(descriptor, -1, folder.stat().st_gid)
            os.fchmod(descriptor, 0o640)
        fresh.rename(folder / "bus")


async def serve(settings: Settings) -> None:
    """Run the server until it ends or this is cancelled.

    Raises:
        BusError: the server did not start, or ended by itself.
    """
    files = server.ServerFiles(settings.state_dir, settings.run_dir)
    nodes = [settings.node, *settings.nodes]
    async with server.running(
        files, nodes=nodes, host=settings.host, port=settings.port
    ) as running:
        async with connection.connect(running.settings("admin"), name="admin") as bus:
            await stream_setup.ensure(bus)
            for node in nodes:
                nonce = JoinNonce(nonce=secrets.token_hex(16))
                await stream_setup.ensure_node(bus, node, wire.encode(nonce))
            hand_out(files, settings.node)
            link_own(files, settings.node)
            process.notify("READY=1")
            # a server that a full disk stalled is ended where that helps; systemd starts it again
            disk = BusDisk(files, bus, Journal(), running.stop)
            async with asyncio.TaskGroup() as group:
                watching = group.create_task(disk.keep())
                code = await running.wait()
                watching.cancel()
        msg = f"nats-server ended by itself with {code}; see {files.log}"
        raise BusError(msg)


if __name__ == "__main__":
    chosen = load(Settings)
    sys.exit(process.run(chosen, lambda: serve(chosen)))
