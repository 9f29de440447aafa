"""What each user may do on the bus (design §3 rule 7): allow-lists, inside the user's own account.

An allow-list names what may be said and heard; that nothing said can be *answered* into another's
subjects is the accounts' work (`accounts`).
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from virtbus.bus.consumers import node_consumer
from virtbus.bus.declaration import COMMANDS, WATCHING_SERVICES
from virtbus.bus.owners import BRIDGE
from virtbus.schemas.generate_channels import CHANNELS, Channel, Plane
from virtbus.schemas.subjects import api

ADMIN = "admin"
CONTROLLER = "controller"
CLIENT = "client"
OBSERVER = "observer"
SYS = "sys"

CONTROL_ACCOUNT = "CTL"
SYSTEM_ACCOUNT = "SYS"

READS = frozenset({"get", "list", "watch", "events", "status"})
"""The API's verbs that change nothing; an observer has these."""
SERVER_ANSWERS = "_R_.>"
"""Where the server leads answers across accounts; it makes each token, at random."""
ANSWER_HOURS = 24
"""How long after a request its one answer may come: a pull takes hours at worst."""
HELPER_FACTS = {
    "imaged": ("image.*", "disks.*", "trace.span"),
    "netd": ("network.*", "trace.span"),
}
"""The kinds of facts that a node's helpers store (`schemas.events.Kind`)."""
NODE_WATCHED = ("progress", "ready", "tele")
"""What a node says to whom it may concern: `virtbus.node.<id>.<one of these>.>`."""


@dataclass(frozen=True, slots=True)
class Role:
    """One user: its account, and what it may publish and subscribe to; no list means everything."""

    user: str
    account: str
    inbox_prefix: str
    publish: tuple[str, ...] = ()
    subscribe: tuple[str, ...] = ()
    node: str = ""
    answers: bool = False
    """May publish one answer to each request that it got, for ANSWER_HOURS."""


def admin() -> Role:
    """Declares streams and joins nodes; everything in the account that owns the streams."""
    return Role(ADMIN, CONTROL_ACCOUNT, "_INBOX_admin")


def sys() -> Role:
    """Asks servers how they are, and to read their configuration again; sees no message."""
    return Role(
        SYS,
        SYSTEM_ACCOUNT,
        "_INBOX_sys",
        publish=("$SYS.REQ.SERVER.PING.>", "$SYS.REQ.SERVER.PING", "$SYS.REQ.SERVER.*.RELOAD"),
        subscribe=("_INBOX_sys.>",),
    )


def controller() -> Role:
    """Writes records and leases; makes no stream but the one in memory, and deletes none.

    It may put right the two buckets that nodes write: a controller from before accounts wants
    them otherwise, and must be able to run beside this one. It trims facts and statuses of a node
    that takes what others need.
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
CLIENT_SPAN = "virtbus.tele.client.span"


def _watched(inbox_prefix: str) -> tuple[str, ...]:
    parts = (f"virtbus.node.*.{part}.>" for part in NODE_WATCHED)
    return (f"{inbox_prefix}.>", "virtbus.evt.>", *parts)


BRIDGE_VERBS = {
    "vm": ("create", "get", "watch", "delete", "start", "pause", "unpause", "reset", "soft-reboot"),
    "node": ("list",),
}
"""What a bridge asks of the API. Controllers show and change it the VMs that it made only."""
BRIDGE_STREAMS = frozenset({"console", "vnc", "port", "screenshot", "guest"})


def bridge(cluster: str = "") -> Role:
    """The bridge of a Kubernetes cluster: what it needs for the VMs that it made (`owners`)."""
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


def client() -> Role:
    """People and the CLI: the API, consoles, logs, guests, and all facts.

    The client's inbox prefix is NATS's own default, so that `nats req` works without options.
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
    """What anybody outside a node may ask its services: subject, and whether it has many answers.

    A console or log has one subject more, with its session's name: what is typed, or "still here".
    """
    for channel in CHANNELS:
        if channel.function == "rpc" and (channel.sender == "client" or not for_clients):
            many = channel.plane is Plane.STREAM
            yield channel.subject, many
            if many:
                yield f"{channel.subject}.{{session}}", False


def observer() -> Role:
    """Dashboards and auditors: the reading half of the API and all facts; no console, no log."""
    inbox_prefix = "_INBOX_observer"
    return Role(
        OBSERVER,
        OBSERVER.upper(),
        inbox_prefix,
        publish=(*(channel.subject for channel in _api(reads_only=True)), RENEW, "$SRV.>"),
        subscribe=_watched(inbox_prefix),
    )


def filled(subject: str, node: str) -> str:
    """A subject of the catalogue for one node, or `*`, and every value of its other parameters."""
    return re.sub(r"\{\w+\}", "*", subject.replace("{node}", node))


def streamed(subject: str) -> bool:
    """True where one request of the catalogue has many answers."""
    return any(c.subject == subject and c.plane is Plane.STREAM for c in CHANNELS)


def node_account(node: str) -> str:
    """The account of a host's services."""
    return f"node-{node}"


def node_users(node: str) -> tuple[Role, ...]:
    """The users of a host: `node-<id>` for the agent, and less for its helpers."""
    return (agent(node), helper(node, "imaged"), helper(node, "netd"))


def agent(node: str) -> Role:
    """The nodeagent: all that its node may, so that one file is enough for a whole node."""
    watches = [("KV_vm", node_consumer(node, service)) for service in WATCHING_SERVICES]
    consumers = [*watches, ("CMD", node_consumer(node, COMMANDS))]
    return Role(
        f"node-{node}",
        node_account(node),
        f"_INBOX_{node}",
        publish=(
            *(f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{own}" for stream, own in consumers),
            *(f"$JS.API.CONSUMER.INFO.{stream}.{own}" for stream, own in consumers),
            *(f"$JS.API.CONSUMER.RESET.{stream}.{own}" for stream, own in watches),
            *(f"$JS.ACK.{stream}.{own}.>" for stream, own in consumers),
            *(f"$JS.API.DIRECT.GET.KV_{kv}.$KV.{kv}.{node}.>" for kv in ("vm", "sec", "st")),
            f"$KV.st.{node}.*",
            f"$KV.node.{node}",
            f"virtbus.evt.{node}.>",
            f"virtbus.node.{node}.>",
            *_answers(node),
        ),
        subscribe=(f"virtbus.node.{node}.>", f"_INBOX_{node}.>", "$SRV.>"),
        node=node,
    )


def helper(node: str, service: str) -> Role:
    """The imaged or netd of a node: its own watch and kinds of facts; no status, secret, command.

    It answers what it is asked, and nothing else: the server remembers each request's reply
    subject. The acknowledgements are those of its own watch, which wants none: so the server need
    not remember the reply subject of each record.
    """
    own = node_consumer(node, service)
    part = "image" if service == "imaged" else "net"
    progress = (f"virtbus.node.{node}.progress.*.image",) if service == "imaged" else ()
    return Role(
        f"{service}-{node}",
        node_account(node),
        f"_INBOX_{node}_{service}",
        publish=(
            *(f"$JS.API.CONSUMER.{verb}.KV_vm.{own}" for verb in ("MSG.NEXT", "INFO", "RESET")),
            f"$JS.ACK.KV_vm.{own}.>",
            *(f"virtbus.evt.{node}.*.{kind}" for kind in HELPER_FACTS[service]),
            f"virtbus.node.{node}.ready.*.{part}",
            *progress,
            f"virtbus.node.{node}.tele.{service}",
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
    """Where answers go: to other accounts by way of the server, or within the node."""
    return (SERVER_ANSWERS, *(f"_INBOX_{node}{part}.>" for part in ("", "_imaged", "_netd")))


def fixed() -> tuple[Role, ...]:
    """The users that every bus has."""
    return (admin(), controller(), client(), bridge(), observer())
