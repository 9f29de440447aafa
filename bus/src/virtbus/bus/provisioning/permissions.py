"""Defines the permissions of each user on the bus: allow-lists within the user's own account.

An allow-list names the subjects that a user may publish and subscribe to. The reply subject of a
request is limited by the separate accounts (`accounts`).
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from virtbus.bus.client.consumers import node_consumer
from virtbus.bus.client.owners import BRIDGE, CRI
from virtbus.bus.provisioning.stream_setup import WATCHING_SERVICES
from virtbus.schemas.catalogue import CHANNELS, Channel, Plane
from virtbus.schemas.subjects import OPERATIONS, api, names_ask, node_instance

ADMIN = "admin"
CONTROLLER = "controller"
CLIENT = "client"
OBSERVER = "observer"
SYS = "sys"

CONTROL_ACCOUNT = "CTL"
SYSTEM_ACCOUNT = "SYS"

READS = frozenset({"get", "list", "offers", "watch", "events", "status"})
"""The API's verbs that change nothing. An observer may use only these."""
SERVER_ANSWERS = "_R_.>"
"""The reply subjects of requests across accounts. The server generates them at random."""
ANSWER_HOURS = 24
"""Hours within which imaged or netd may answer a request. An image pull may take hours."""
HELPER_FACTS = {
    "imaged": ("image.*", "disks.*", "trace.span"),
    "netd": ("network.ready", "network.failed", "network.released", "trace.span"),
}
"""The kinds of events that a node's helpers, imaged and netd, store (`schemas.events`)."""
NODE_WATCHED = ("progress", "ready", "report")
"""Tokens in the subjects that a node publishes for others: `virtbus.node.<id>.<token>.>`."""


@dataclass(frozen=True, slots=True)
class Role:
    """One user with its account and allowed subjects. An empty `publish` allows all subjects."""

    user: str
    account: str
    inbox_prefix: str
    publish: tuple[str, ...] = ()
    subscribe: tuple[str, ...] = ()
    node: str = ""
    answers: bool = False
    """If True, the user may publish one answer to each received request, within ANSWER_HOURS."""


def admin() -> Role:
    """Return the user that creates streams and joins nodes, with all rights in its account."""
    return Role(ADMIN, CONTROL_ACCOUNT, "_INBOX_admin")


def sys() -> Role:
    """Return the user for server status and configuration reload."""
    return Role(
        SYS,
        SYSTEM_ACCOUNT,
        "_INBOX_sys",
        publish=("$SYS.REQ.SERVER.PING.>", "$SYS.REQ.SERVER.PING", "$SYS.REQ.SERVER.*.RELOAD"),
        subscribe=("_INBOX_sys.>",),
    )


def controller() -> Role:
    """Return the user that writes records and leases. It may create only the stream KV_node.

    It may update the two buckets that nodes write, because controllers of another version configure
    them differently and may run at the same time. If a node fills the streams EVT or KV_st, this
    user may purge the node's events and statuses.
    """
    return Role(
        CONTROLLER,
        CONTROL_ACCOUNT,
        "_INBOX_controller",
        publish=(
            "virtbus.>",
            *(f"$KV.{bucket}.>" for bucket in ("vm", "sec", "st", "lease")),
            "$JS.API.INFO",
            "$JS.API.STREAM.LIST",
            "$JS.API.STREAM.INFO.*",
            "$JS.API.STREAM.MSG.GET.*",
            "$JS.API.STREAM.CREATE.KV_node",
            *(f"$JS.API.STREAM.PURGE.{stream}" for stream in ("EVT", "KV_st")),
            *(f"$JS.API.STREAM.UPDATE.KV_{bucket}" for bucket in ("node", "st")),
            "$JS.API.DIRECT.GET.>",
            "$JS.API.CONSUMER.CREATE.>",
            *(f"$JS.API.CONSUMER.{verb}.*.*" for verb in ("DELETE", "INFO", "MSG.NEXT", "RESET")),
            "$JS.API.CONSUMER.LIST.*",
            "$JS.API.CONSUMER.NAMES.*",
            "$JS.API.STREAM.NAMES",
            "$JS.ACK.>",
            "$SRV.>",
            SERVER_ANSWERS,
            "_INBOX_admin.>",
            "_INBOX_controller.>",
        ),
        subscribe=("virtbus.>", "$SRV.>", "_INBOX_controller.>"),
    )


def _api(*, reads_only: bool) -> Iterator[Channel]:
    for channel in CHANNELS:
        verb = channel.id.rpartition(".")[2]
        if channel.function == "api" and (verb in READS or not reads_only):
            yield channel


RENEW = "virtbus.api.v1.watch.renew.*.*"
CLIENT_SPAN = "virtbus.report.client.span"


def _watched(inbox_prefix: str) -> tuple[str, ...]:
    parts = (f"virtbus.node.*.{part}.>" for part in NODE_WATCHED)
    return (f"{inbox_prefix}.>", "virtbus.evt.>", *parts)


BRIDGE_VERBS = {
    "vm": (
        *("create", "get", "watch", "update", "delete", "start", "pause", "unpause"),
        *("reset", "soft-reboot", "freeze", "thaw"),
    ),
    "node": ("list",),
    "security-group": ("create", "list", "update", "delete"),
}
"""API verbs of a bridge. Controllers accept them only for the bridge's own VMs and groups."""
BRIDGE_STREAMS = frozenset({"console", "vnc", "port", "screenshot", "guest"})


def bridge(cluster: str = "") -> Role:
    """Return the user of a bridge. The module `owners` limits a bridge to its own VMs."""
    user = f"{BRIDGE}-{cluster}" if cluster else BRIDGE
    inbox_prefix = f"_INBOX_{user}"
    return Role(
        user,
        user.upper(),
        inbox_prefix,
        publish=(
            *(api(resource, verb) for resource, verbs in BRIDGE_VERBS.items() for verb in verbs),
            RENEW,
            *(
                filled(subject, "*")
                for subject, _ in node_rpc(for_clients=True)
                if subject.split(".")[5] in BRIDGE_STREAMS
            ),
        ),
        subscribe=(f"{inbox_prefix}.>",),
    )


CRI_VERBS = {
    "vm": ("create", "get", "watch", "update", "start", "stop", "delete"),
    "image": ("pull",),
    "node": ("get",),
}
"""API verbs of a node's container runtime, which creates a VM for each of its pods."""
CRI_CALLS = frozenset({"console", "port", "exec"})
"""Requests of a container runtime to the agent of its own node."""


def cri(node: str) -> Role:
    """Return the user of a node's container runtime, limited to its own VMs by `owners`."""
    user = f"{CRI}{node}"
    inbox_prefix = f"_INBOX_{user}"
    return Role(
        user,
        user.upper(),
        inbox_prefix,
        publish=(
            *(api(resource, verb) for resource, verbs in CRI_VERBS.items() for verb in verbs),
            RENEW,
            *(
                filled(subject, node)
                for subject, _ in node_rpc(for_clients=True)
                if subject.split(".")[5] in CRI_CALLS
            ),
        ),
        subscribe=(f"{inbox_prefix}.>",),
    )


def client() -> Role:
    """Return the user for people and the CLI: the API, consoles, guests, uploads, and all events.

    Its inbox prefix is NATS's default, so that `nats req` works without options.
    """
    inbox_prefix = "_INBOX"
    return Role(
        CLIENT,
        CLIENT.upper(),
        inbox_prefix,
        publish=(
            *(channel.subject for channel in _api(reads_only=False)),
            RENEW,
            *(filled(subject, "*") for subject, _ in node_rpc(for_clients=True)),
            CLIENT_SPAN,
            "$SRV.>",
        ),
        subscribe=_watched(inbox_prefix),
    )


def node_rpc(*, for_clients: bool = False) -> Iterator[tuple[str, bool]]:
    """Yield each subject of a node's services for other accounts, and True for a stream.

    `for_clients` leaves out the subjects that only controllers call. A stream, such as a console,
    has a second subject per session for input and keep-alives.
    """
    for channel in CHANNELS:
        if channel.function == "rpc" and (channel.sender == "client" or not for_clients):
            many = channel.plane is Plane.STREAM
            yield channel.subject, many
            if many:
                yield f"{channel.subject}.{{session}}", False


def observer() -> Role:
    """Return the user for dashboards and auditors: the read-only API and all events.

    An observer has no access to consoles and logs.
    """
    inbox_prefix = "_INBOX_observer"
    return Role(
        OBSERVER,
        OBSERVER.upper(),
        inbox_prefix,
        publish=(*(channel.subject for channel in _api(reads_only=True)), RENEW, "$SRV.>"),
        subscribe=_watched(inbox_prefix),
    )


def filled(subject: str, node: str) -> str:
    """Fill a subject of CHANNELS: `{node}` becomes `node` (id or `*`), other parameters `*`."""
    return re.sub(r"\{\w+\}", "*", subject.replace("{node}", node))


def streamed(subject: str) -> bool:
    """Return True if a request to this subject of CHANNELS has many answers."""
    return any(c.subject == subject and c.plane is Plane.STREAM for c in CHANNELS)


def node_account(node: str) -> str:
    """Return the name of the account that a node's services share."""
    return f"node-{node}"


def node_users(node: str) -> tuple[Role, ...]:
    """Return a node's users: agent, imaged and netd. The last two have fewer rights."""
    return (agent(node), helper(node, "imaged"), helper(node, "netd"))


def users_on(node: str) -> tuple[Role, ...]:
    """Return all users that a node may have: its services and its container runtime."""
    return (*node_users(node), cri(node))


def agent(node: str) -> Role:
    """Return the nodeagent's user, with all rights of its node.

    With this user's credentials file, a node can run all its services.
    """
    consumers = [f"KV_vm.{node_consumer(node, service)}" for service in WATCHING_SERVICES]
    return Role(
        f"node-{node}",
        node_account(node),
        f"_INBOX_{node}",
        publish=(
            *(f"$JS.API.CONSUMER.MSG.NEXT.{own}" for own in consumers),
            *(f"$JS.API.CONSUMER.INFO.{own}" for own in consumers),
            *(f"$JS.API.CONSUMER.RESET.{own}" for own in consumers),
            *(f"$JS.ACK.{own}.>" for own in consumers),
            *(f"$JS.API.DIRECT.GET.KV_{kv}.$KV.{kv}.{node}.>" for kv in ("vm", "sec", "st")),
            f"$JS.API.DIRECT.GET.KV_node.$KV.node.{node}",
            f"$KV.st.{node}.*",
            f"$KV.st.{node}.{OPERATIONS}.*",
            f"$KV.node.{node}",
            f"virtbus.evt.{node}.>",
            f"virtbus.node.{node}.>",
            names_ask(node),
            *_answers(node),
        ),
        subscribe=(f"virtbus.node.{node}.>", f"_INBOX_{node}.>", "$SRV.>"),
        node=node,
    )


def helper(node: str, service: str) -> Role:
    """Return the user of a node's imaged or netd, with rights for its own watch and events.

    It has no access to secrets and commands. Among the statuses, it may read only the instance key.
    It may answer requests, because the server remembers the reply subject of each request. The
    messages of its watch have `$JS.ACK` reply subjects. They are allowed by name, so that the
    server does not remember them.
    """
    own = node_consumer(node, service)
    part = "image" if service == "imaged" else "net"
    more = (f"virtbus.node.{node}.progress.*.image",) if service == "imaged" else (names_ask(node),)
    return Role(
        f"{service}-{node}",
        node_account(node),
        f"_INBOX_{node}_{service}",
        publish=(
            *(f"$JS.API.CONSUMER.{verb}.KV_vm.{own}" for verb in ("MSG.NEXT", "INFO", "RESET")),
            f"$JS.ACK.KV_vm.{own}.>",
            f"$JS.API.DIRECT.GET.KV_st.{node_instance(node)}",
            *(f"virtbus.evt.{node}.*.{kind}" for kind in HELPER_FACTS[service]),
            f"virtbus.node.{node}.ready.*.{part}",
            *more,
            f"virtbus.node.{node}.report.{service}",
        ),
        subscribe=(
            f"virtbus.node.{node}.rpc.{service}.>",
            f"_INBOX_{node}_{service}.>",
            "$SRV.>",
        ),
        node=node,
        answers=True,
    )


def _answers(node: str) -> tuple[str, ...]:
    """Return the inboxes to which an agent may reply: in other accounts, and on its own node."""
    return (SERVER_ANSWERS, *(f"_INBOX_{node}{part}.>" for part in ("", "_imaged", "_netd")))


def fixed() -> tuple[Role, ...]:
    """Return the users that each bus has."""
    return (admin(), controller(), client(), bridge(), observer())
