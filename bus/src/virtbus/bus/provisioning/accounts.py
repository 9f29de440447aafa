"""Builds a bus's NATS accounts: for the controllers, each node, client role, bridge and runtime.

The controllers' account owns the streams. A subject crosses accounts if one account exports the
subject and the other imports it. The server rewrites each reply subject that crosses. So a reply or
deliver subject of a node's choice never acts in the account with the streams (BUS-06, BUS-07). The
server also adds the requester's account to each request.

Clients' requests reach nodes through the controllers' account. Published messages of a node go
directly to a client's account, because the server does not forward imports of imports.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from virtbus.bus.client.consumers import node_consumer
from virtbus.bus.provisioning import permissions
from virtbus.bus.provisioning.permissions import CONTROL_ACCOUNT, SYSTEM_ACCOUNT, Role
from virtbus.bus.provisioning.stream_setup import WATCHING_SERVICES

QUIET = "24h"
"""Time after which the server drops the reply path of a silent stream, for example a console."""
_DISCOVERY = "$SRV.>"
_OF_A_NODE = re.compile(r"^virtbus\.node\.[^.]+\.")


@dataclass(frozen=True, slots=True)
class RequestExport:
    """A service export of `subject`. With `streamed`, a request has many answers."""

    subject: str
    streamed: bool = False


@dataclass(frozen=True, slots=True)
class Export:
    """An exported service or subject of published messages, and the accounts that may import it."""

    what: RequestExport | str
    to: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Import:
    """An import from `account`. `local` is its new subject in the importing account, if any."""

    what: RequestExport | str
    account: str
    local: str = ""


@dataclass(slots=True)
class Account:
    """One account of the server's configuration."""

    name: str
    users: list[Role] = field(default_factory=list)
    exports: list[Export] = field(default_factory=list)
    imports: list[Import] = field(default_factory=list)
    streams: bool = False
    renamed: dict[str, str] = field(default_factory=dict)
    """New subjects by old subjects. The server renames a subject at a publish in the account."""


def _services(role: Role) -> list[RequestExport]:
    """Return the services of the controllers' account that a user may call.

    These are the subjects that the user may publish outside the user's own account.
    """
    home = ["_INBOX", permissions.SERVER_ANSWERS]
    if role.node:
        home.append(f"virtbus.node.{role.node}.")
    return [
        RequestExport(subject, _streamed(subject))
        for subject in role.publish
        if not subject.startswith(tuple(home))
    ]


def _streamed(subject: str) -> bool:
    """Return True for pulls, watches, discovery, consoles and logs, which have many answers."""
    return (
        subject == _DISCOVERY
        or ".CONSUMER.MSG.NEXT." in subject
        or permissions.streamed(_OF_A_NODE.sub("virtbus.node.{node}.", subject))
        or permissions.streamed(subject)
    )


def accounts(
    nodes: Sequence[str],
    *,
    bridges: Sequence[str] = (),
    cris: Sequence[str] = (),
    system: bool = False,
) -> list[Account]:
    """Return all accounts of a bus.

    `bridges` are the clusters of further bridges (`permissions.bridge`). `cris` are the nodes that
    run `virtbus-cri`. `system` adds the user that may reload the servers' configuration.
    """
    control = Account(CONTROL_ACCOUNT, streams=True)
    clients: dict[str, Account] = {}
    more = (*map(permissions.bridge, bridges), *map(permissions.cri, cris))
    for role in (*permissions.fixed(), *more):
        if role.account == CONTROL_ACCOUNT:
            control.users.append(role)
            continue
        clients[role.account] = account = Account(role.account, [role])
        account.imports += [Import(service, CONTROL_ACCOUNT) for service in _services(role)]
        if _hears_events(role):
            account.imports.append(Import("virtbus.evt.>", CONTROL_ACCOUNT))
    control.exports += _offered(clients.values())
    hearing = [one for one in clients.values() if any(_hears_events(role) for role in one.users)]
    own = [_node(name, control, hearing) for name in nodes]
    known = [Account(SYSTEM_ACCOUNT, [permissions.sys()] if system else [])]
    return [*known, control, *clients.values(), *own]


def _hears_events(role: Role) -> bool:
    return "virtbus.evt.>" in role.subscribe


def _offered(clients: Iterable[Account]) -> list[Export]:
    takers: dict[RequestExport | str, list[str]] = {}
    for account in clients:
        for one in account.imports:
            takers.setdefault(one.what, []).append(account.name)
    return [Export(what, tuple(names)) for what, names in takers.items()]


def _local(subject: str) -> str:
    """Return the new subject of a JetStream call inside a node's account; empty for no renaming.

    In an account without streams, the server itself answers `$JS.API.>` with "not enabled". The
    requester would take this first answer, so the subject is renamed. Pulls and direct gets do not
    get this answer.
    """
    head = "$JS.API.CONSUMER."
    verb = subject.removeprefix(head).partition(".")[0]
    one_answer = subject.startswith(head) and verb in {"INFO", "RESET"}
    return f"_JS.{subject.removeprefix(head)}" if one_answer else ""


def heard_of(node: str) -> str:
    """Return a subject that each server answers after loading the node's account."""
    return _local(f"$JS.API.CONSUMER.INFO.KV_vm.{node_consumer(node, WATCHING_SERVICES[0])}")


def _node(name: str, control: Account, clients: list[Account]) -> Account:
    """Return a node's account. Add the matching exports and imports to `control` and `clients`."""
    agent = permissions.agent(name)
    account = Account(agent.account, list(permissions.node_users(name)))
    for service in _services(agent):
        control.exports.append(Export(service, (account.name,)))
        local = _local(service.subject)
        account.imports.append(Import(service, CONTROL_ACCOUNT, local))
        if local:
            account.renamed[service.subject] = local
    asked = [
        RequestExport(permissions.filled(subject, name), many)
        for subject, many in permissions.node_rpc()
    ]
    for service in (*asked, RequestExport(_DISCOVERY, streamed=True)):
        account.exports.append(Export(service, (CONTROL_ACCOUNT,)))
        control.imports.append(Import(service, account.name))
    heard = [f"virtbus.node.{name}.{part}.>" for part in permissions.NODE_WATCHED]
    for stream in (f"virtbus.evt.{name}.>", *heard):
        account.exports.append(
            Export(stream, (CONTROL_ACCOUNT, *(client.name for client in clients)))
        )
        if not stream.startswith("virtbus.evt."):
            control.imports.append(Import(stream, account.name))
        for client in clients:
            client.imports.append(Import(stream, account.name))
    return account
