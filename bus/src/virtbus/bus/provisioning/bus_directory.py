"""Writes the directory of a production bus: CA, keys, accounts, server folders, credentials.

`bus.json` describes the bus, without secrets. The other files are made from `bus.json` and from
existing keys, so a second write changes nothing. The nkey seeds are only in `creds/`. Servers get
the public keys.
"""

import json
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from virtbus.bus.client import nkeys
from virtbus.bus.errors import BusError
from virtbus.bus.provisioning import certificate_authority, permissions
from virtbus.bus.provisioning.accounts import Account, accounts
from virtbus.bus.provisioning.credentials import write_creds, write_secret
from virtbus.bus.provisioning.permissions import Role
from virtbus.bus.provisioning.server_config import ServerLogin, accounts_block

CLIENT_PORT, ROUTE_PORT = 4222, 6222
STORE = "/var/lib/virtbus/nats"
PLAN = "bus.json"

_SERVER = """\
# Made by `virtbus bus init`; accounts.conf beside it by `virtbus bus add-node`, too.
server_name: "{name}"
listen: "{listen}:{port}"
{monitor}max_payload: 1MB
max_control_line: 4KB
max_connections: {connections}
ping_interval: 10s
write_deadline: 5s
lame_duck_duration: 30s
feature_flags {{ js_ack_fc_v2: false }}
tls {{
  cert_file: "{at}/server.crt"
  key_file: "{at}/server.key"
  min_version: "1.2"
  timeout: 5
}}
{cluster}jetstream {{
  store_dir: "{store}"
  sync_interval: always
  strict: true
  max_memory_store: 256MB
  max_file_store: 8GB
}}
include accounts.conf
"""
_CLUSTER = """\
cluster {{
  name: "virtbus"
  listen: "{listen}:{port}"
  no_advertise: true
  # Servers know each other by certificates of the CA, both ways.
  tls {{
    cert_file: "{at}/server.crt"
    key_file: "{at}/server.key"
    ca_file: "{at}/ca.crt"
    verify: true
    timeout: 5
  }}
  routes: [{routes}]
}}
"""


_MONITOR = """\
# For this host only; the figures name users and subjects.
http: "127.0.0.1:{port}"
"""


@dataclass(slots=True)
class BusPlan:
    """The content of `bus.json`.

    `servers` has the host names of each server. Clients and other servers use the first name.
    """

    servers: list[list[str]]
    port: int = CLIENT_PORT
    route_port: int = ROUTE_PORT
    monitor_port: int = 8222
    """The port for monitoring on 127.0.0.1; 0 means no monitoring."""
    bind_names: bool = False
    """If True, a server listens only on its first name. If False, it listens on all addresses."""
    store: str = STORE
    """The path of a server's streams. `{number}` stands for the server's number."""
    installed_at: str = ""
    """The path of a server's folder on its host; empty: the path in this directory."""
    max_connections: int = 10_000
    nodes: list[str] = field(default_factory=list)
    bridges: list[str] = field(default_factory=list)
    """Kubernetes clusters that have their own bridge, in addition to the user `bridge`."""
    cris: list[str] = field(default_factory=list)
    """Nodes whose container runtime (`virtbus-cri`) has a user."""
    keys: dict[str, str] = field(default_factory=dict)
    """The public nkey of each user."""

    @property
    def url(self) -> str:
        """The servers' URLs for clients, separated by commas."""
        return ",".join(f"tls://{names[0]}:{self.port}" for names in self.servers)

    @property
    def roles(self) -> list[Role]:
        return [role for account in self.accounts for role in account.users]

    @property
    def accounts(self) -> list[Account]:
        return accounts(self.nodes, bridges=self.bridges, cris=self.cris, system=True)


class BusDirectory:
    """The directory of a bus."""

    def __init__(self, base: Path) -> None:
        self.base = base.absolute()

    @property
    def exists(self) -> bool:
        return (self.base / PLAN).exists()

    def creds(self, user: str) -> Path:
        name = "bus" if user == permissions.CLIENT else user
        return self.base / "creds" / f"{name}.creds"

    def folder(self, number: int) -> Path:
        """Return the folder of a server. Numbers start at 1."""
        return self.base / f"server-{number}"

    def plan(self) -> BusPlan:
        """Return the content of `bus.json`.

        Raises:
            BusError: `bus.json` does not exist or is malformed.
        """
        file = self.base / PLAN
        try:
            content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            return BusPlan(**content)
        except FileNotFoundError:
            msg = f"{file} does not exist: make a bus there with `virtbus bus init`"
            raise BusError(msg) from None
        except (OSError, ValueError, TypeError) as error:
            msg = f"{file} cannot be read: {error}"
            raise BusError(msg) from error

    def write(self, plan: BusPlan) -> list[Path]:
        """Write all files that are missing or outdated; return the changed files.

        Raises:
            BusError: `plan` has a user's public key, and the user's credentials file is missing.
        """
        changed: list[Path] = []
        for folder in (self.base, self.base / "creds"):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        certificate_authority.ensure_ca(self.base / "ca")
        ca = (self.base / "ca.crt").read_text(encoding="ascii")
        for role in plan.roles:
            seed = self._seed(role.user, plan)
            plan.keys[role.user] = nkeys.public(seed)
            identity = {"nkey_seed": seed, "ca": ca}
            if write_creds(self.creds(role.user), role, plan.url, identity):
                changed.append(self.creds(role.user))
        known = {role.user for role in plan.roles}
        plan.keys = {user: key for user, key in sorted(plan.keys.items()) if user in known}
        for number, names in enumerate(plan.servers, start=1):
            changed += self._write_server(plan, number, names)
        changed += _changed(self.base / PLAN, json.dumps(asdict(plan), indent=1) + "\n")
        return changed

    def _seed(self, user: str, plan: BusPlan) -> str:
        file = self.creds(user)
        if not file.exists():
            if user in plan.keys:
                msg = (
                    f"{file} is missing, but the bus has its public key: restore it, or remove"
                    f" the user from {self.base / PLAN} to get a new key"
                )
                raise BusError(msg)
            return nkeys.new_seed()
        return str(json.loads(file.read_text(encoding="utf-8"))["nkey_seed"])

    def _write_server(self, plan: BusPlan, number: int, names: list[str]) -> list[Path]:
        folder = self.folder(number)
        folder.mkdir(exist_ok=True, mode=0o700)
        changed: list[Path] = []
        if certificate_authority.ensure_server(self.base / "ca", folder / "server", names):
            changed += [folder / "server.crt", folder / "server.key"]
        shutil.copyfile(self.base / "ca.crt", folder / "ca.crt")
        at = plan.installed_at or str(folder)
        routes = ", ".join(
            f'"tls://{other[0]}:{plan.route_port}"' for other in plan.servers if other != names
        )
        listen = names[0] if plan.bind_names else "0.0.0.0"  # noqa: S104  TLS and nkeys protect it
        monitor = _MONITOR.format(port=plan.monitor_port) if plan.monitor_port else ""
        cluster = _CLUSTER.format(at=at, listen=listen, port=plan.route_port, routes=routes)
        text = _SERVER.format(
            name=f"virtbus-{number}",
            port=plan.port,
            monitor=monitor,
            listen=listen,
            connections=plan.max_connections,
            at=at,
            store=plan.store.replace("{number}", str(number)),
            cluster=cluster if len(plan.servers) > 1 else "",
        )
        changed += _changed(folder / "nats-server.conf", text)
        logins = {user: ServerLogin(nkey=key) for user, key in plan.keys.items()}
        block = accounts_block(plan.accounts, logins)
        return changed + _changed(folder / "accounts.conf", block)

    def add_node(self, node: str) -> list[Path]:
        plan = self.plan()
        if node not in plan.nodes:
            plan.nodes.append(node)
        return self.write(plan)

    def add_bridge(self, cluster: str) -> list[Path]:
        plan = self.plan()
        if cluster not in plan.bridges:
            plan.bridges.append(cluster)
        return self.write(plan)

    def add_cri(self, node: str) -> list[Path]:
        """Create the account of a node's container runtime; return the changed files.

        Raises:
            BusError: the bus has no such node.
        """
        plan = self.plan()
        if node not in plan.nodes:
            msg = f"{node} has no account here; `virtbus bus add-node {node}` gives it one"
            raise BusError(msg)
        if node not in plan.cris:
            plan.cris.append(node)
        return self.write(plan)

    def withdrawn(self, node: str) -> Path:
        """Return the path of a removed node's credentials. Servers must refuse them."""
        return self.creds(f"withdrawn-{node}")

    def renew_node(self, node: str) -> list[Path]:
        """Replace a node's keys; return the changed files.

        After a reload, the servers refuse the old keys.

        Raises:
            BusError: the bus has no such node.
        """
        plan = self.plan()
        if node not in plan.nodes:
            msg = f"{node} has no account here; `virtbus bus add-node {node}` gives it one"
            raise BusError(msg)
        users = [role.user for role in permissions.users_on(node)]
        plan.keys = {user: key for user, key in plan.keys.items() if user not in users}
        _changed(self.base / PLAN, json.dumps(asdict(plan), indent=1) + "\n")
        for user in users:
            self.creds(user).unlink(missing_ok=True)
        return self.write(plan)

    def remove_node(self, node: str) -> list[Path]:
        """Remove a node's account and credentials. A new node of this name gets new keys."""
        plan = self.plan()
        with suppress(FileNotFoundError):
            write_secret(self.withdrawn(node), self.creds(f"node-{node}").read_text("utf-8"))
        gone = [role.user for role in permissions.users_on(node)]
        plan.nodes = [one for one in plan.nodes if one != node]
        plan.cris = [one for one in plan.cris if one != node]
        changed = self.write(plan)
        for user in gone:
            self.creds(user).unlink(missing_ok=True)
        return changed

    def problems(self, nats_server: Path) -> Iterator[str]:
        """Check all files; yield each problem as a sentence (BUS-11, BUS-16, SEC-03)."""
        plan = self.plan()
        for secret in [*self.base.glob("*.key"), *self.base.glob("*/*.key"), *self._all_creds()]:
            if secret.stat().st_mode & 0o077 and secret != self.creds(permissions.CLIENT):
                yield f"{secret} is open to others: chmod 0600 {secret}"
        for role in plan.roles:
            if not self.creds(role.user).exists():
                yield f"{self.creds(role.user)} is missing: {role.user} cannot log in"
        for number, names in enumerate(plan.servers, start=1):
            folder = self.folder(number)
            yield from certificate_authority.problems(
                self.base / "ca", folder / "server", names, certificate_authority.RENEW_DAYS
            )
            yield from _unsafe(folder / "nats-server.conf")
            if not plan.installed_at:
                yield from _refused(nats_server, folder / "nats-server.conf")

    def _all_creds(self) -> list[Path]:
        return list((self.base / "creds").glob("*.creds"))


def _changed(path: Path, text: str) -> list[Path]:
    """Write a file if its content differs; return its path, or no path if unchanged."""
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return []
    write_secret(path, text)
    return [path]


def _unsafe(config: Path) -> Iterator[str]:
    try:
        lines = config.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        yield str(error)
        return
    settings = {line.partition(":")[0].strip(): line for line in lines if ":" in line}
    for word in ("no_auth_user", "websocket", "mqtt", "leafnodes", "gateway"):
        if any(line.split("#")[0].strip().startswith(word) for line in lines):
            yield f"{config}: {word} allows a login that virtbus does not know"
    monitor = settings.get("http", "")
    if monitor and "127.0.0.1" not in monitor:
        yield f"{config}: the monitoring port is not on 127.0.0.1 alone ({monitor.strip()})"
    for wanted in ("sync_interval: always", "include accounts.conf", "cert_file"):
        if not any(wanted in line.split("#")[0] for line in lines):
            yield f"{config}: {wanted} is missing"


def _refused(nats_server: Path, config: Path) -> Iterator[str]:
    ended = subprocess.run(  # noqa: S603  our own binary and file
        [nats_server, "-t", "-c", config], capture_output=True, text=True, check=False, timeout=30
    )
    if ended.returncode:
        yield f"{config}: {(ended.stderr or ended.stdout).strip()}"


def parse_servers(hosts: Sequence[str], count: int) -> list[list[str]]:
    """Return the host names of each server from the values of `--host`.

    A single server gets all values. Each of several servers gets one value.

    Raises:
        ValueError: a server has no name, or the number of values is wrong.
    """
    split = [[name.strip() for name in host.split(",") if name.strip()] for host in hosts]
    if count == 1:
        split = [[name for names in split for name in names]]
    if len(split) != count or not all(split):
        msg = f"--servers {count} needs {count} times --host, each with the names of one server"
        raise ValueError(msg)
    return split
