"""Permissions of each user on the bus: allow-lists within the user's own account.

An allow-list names the subjects to publish and subscribe to. `accounts` ensures that no *answer*
can be directed into another's subjects.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from virtbus.bus.client.consumers import node_consumer
from virtbus.bus.client.owners import BRIDGE
from virtbus.bus.provisioning.stream_setup import WATCHING_SERVICES
from virtbus.schemas.catalogue import CHANNELS, Channel, Plane
from virtbus.schemas.subjects import api, node_instance

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
"""The subjects of answers across accounts; the server generates each token at random."""
ANSWER_HOURS = 24
"""Time limit for the one answer to a request: a pull takes hours at worst."""
HELPER_FACTS = {
    "imaged": ("image.*", "disks.*", "trace.span"),
    "netd": ("network.*", "trace.span"),
}
"""The kinds of events that a node's helpers store (`schemas.events.Kind`)."""
NODE_WATCHED = ("progress", "ready", "report")
"""Subjects that a node publishes to subscribers: `virtbus.node.<id>.<one of these>.>`."""


@dataclass(frozen=True, slots=True)
class Role:
    """One user: its account, and its allowed subjects; no list means all."""

    user: str
    account: str
    inbox_prefix: str
    publish: tuple[str, ...] = ()
    subscribe: tuple[str, ...] = ()
    node: str = ""
    answers: bool = False
    """May publish one answer to each request that it received, for ANSWER_HOURS."""


def admin() -> Role:
    """Return the user that declares streams and joins nodes: everything in the owner account."""
    return Role(ADMIN, CONTROL_ACCOUNT, "_INBOX_admin")


def sys() -> Role:
    """Return the user for server status and configuration reload; sees no messages."""
    return Role(
        SYS,
        SYSTEM_ACCOUNT,
        "_INBOX_sys",
        publish=("$SYS.REQ.SERVER.PING.>", "$SYS.REQ.SERVER.PING", "$SYS.REQ.SERVER.*.RELOAD"),
        subscribe=("_INBOX_sys.>",),
    )


def controller() -> Role:
    """Return the user that writes records and leases; it creates only the memory stream.

    It may update the two buckets that nodes write, because older controllers configure them
    differently and must be able to run next to this one. It trims events and statuses of a node
    that takes others' space.
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
    "vm": ("create", "get", "watch", "delete", "start", "pause", "unpause", "reset", "soft-reboot"),
    "node": ("list",),
}
"""API verbs of a bridge. Controllers apply them only to VMs that the bridge created."""
BRIDGE_STREAMS = frozenset({"console", "vnc", "port", "screenshot", "guest"})


def bridge(cluster: str = "") -> Role:
    """Return the user of a Kubernetes cluster's bridge: access to the VMs it created (`owners`)."""
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
    """Return the user for people and the CLI: the API, consoles, logs, guests, and all events.

    Its inbox prefix is NATS' default, so that `nats req` works without options.
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
    """Yield the subjects of a node's services that outsiders may call, and if they stream.

    A console or log has one more subject, named after its session, for input and keep-alives.
    """
    for channel in CHANNELS:
        if channel.function == "rpc" and (channel.sender == "client" or not for_clients):
            many = channel.plane is Plane.STREAM
            yield channel.subject, many
            if many:
                yield f"{channel.subject}.{{session}}", False


def observer() -> Role:
    """Return the user for dashboards and auditors: read-only API and all events.

    Consoles and logs are excluded.
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
    """Return a subject of the catalogue for one node, or `*`, with all other parameters as `*`."""
    return re.sub(r"\{\w+\}", "*", subject.replace("{node}", node))


def streamed(subject: str) -> bool:
    """Return True if one request of the catalogue has many answers."""
    return any(c.subject == subject and c.plane is Plane.STREAM for c in CHANNELS)


def node_account(node: str) -> str:
    """Return the account of a host's services."""
    return f"node-{node}"


def node_users(node: str) -> tuple[Role, ...]:
    """Return the users of a host: `node-<id>` for the agent, and its helpers with fewer rights."""
    return (agent(node), helper(node, "imaged"), helper(node, "netd"))


def agent(node: str) -> Role:
    """Return the nodeagent's user: all rights of its node, so one file suffices for a node."""
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
            f"$KV.node.{node}",
            f"virtbus.evt.{node}.>",
            f"virtbus.node.{node}.>",
            *_answers(node),
        ),
        subscribe=(f"virtbus.node.{node}.>", f"_INBOX_{node}.>", "$SRV.>"),
        node=node,
    )


def helper(node: str, service: str) -> Role:
    """Return the user of a node's imaged or netd: its own watch and events.

    It has no access to statuses, secrets or commands. It may answer requests, because the server
    remembers each request's reply subject. Its watch needs no acknowledgements, so the server need
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
            f"$JS.API.DIRECT.GET.KV_st.{node_instance(node)}",
            *(f"virtbus.evt.{node}.*.{kind}" for kind in HELPER_FACTS[service]),
            f"virtbus.node.{node}.ready.*.{part}",
            *progress,
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
    """Return the subjects for answers: to other accounts through the server, or within the node."""
    return (SERVER_ANSWERS, *(f"_INBOX_{node}{part}.>" for part in ("", "_imaged", "_netd")))


def fixed() -> tuple[Role, ...]:
    """Return the users that every bus has."""
    return (admin(), controller(), client(), bridge(), observer())
