"""What each role may do on the bus (design §3 rule 7), as allow-lists for the server's config."""

from dataclasses import dataclass

from virtbus.bus.consumers import node_consumer
from virtbus.bus.declaration import COMMANDS, WATCHING_SERVICES

ADMIN = "admin"
CONTROLLER = "controller"
CLIENT = "client"

REPLY_EXPIRES = "1h"
"""How long a node may answer a request it received: consoles and log streams last that long."""


@dataclass(frozen=True, slots=True)
class Role:
    """One user: what it may publish and subscribe to; empty lists mean everything."""

    user: str
    inbox_prefix: str
    publish: tuple[str, ...] = ()
    deny_publish: tuple[str, ...] = ()
    subscribe: tuple[str, ...] = ()
    answers: bool = False
    node: str = ""


def admin() -> Role:
    """Declares streams and joins nodes; everything."""
    return Role(ADMIN, "_INBOX_admin")


def controller() -> Role:
    """Writes records and leases; cannot delete or empty a stream."""
    return Role(
        CONTROLLER,
        "_INBOX_controller",
        publish=("virtbus.>", "$KV.>", "$JS.API.>", "$JS.ACK.>", "$SRV.>", "_INBOX.>"),
        deny_publish=(
            "$JS.API.STREAM.DELETE.>",
            "$JS.API.STREAM.PURGE.>",
            "$JS.API.STREAM.MSG.DELETE.>",
        ),
        subscribe=("virtbus.>", "$SRV.>", "_INBOX_controller.>"),
        answers=True,
    )


def client() -> Role:
    """People, the CLI, bridges: the API, consoles and logs, and what may be watched.

    Its inbox prefix is NATS's own default, so that `nats req` works without options.
    """
    return Role(
        CLIENT,
        "_INBOX",
        publish=(
            "virtbus.api.v1.>",
            "virtbus.node.*.rpc.agent.console",
            "virtbus.node.*.rpc.agent.console.>",
            "virtbus.node.*.rpc.agent.logs",
            "virtbus.node.*.rpc.agent.logs.>",
            "virtbus.tele.client.span",
            "$SRV.>",
        ),
        subscribe=(
            "_INBOX.>",
            "virtbus.evt.>",
            "virtbus.node.*.progress.>",
            "virtbus.node.*.ready.>",
            "virtbus.node.*.tele.>",
        ),
    )


def node(name: str) -> Role:
    """The services of one host: their own consumers, keys and subjects, and nothing else."""
    watches = [("KV_vm", node_consumer(name, service)) for service in WATCHING_SERVICES]
    consumers = [*watches, ("CMD", node_consumer(name, COMMANDS))]
    return Role(
        f"node-{name}",
        f"_INBOX_{name}",
        publish=(
            *(f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{own}" for stream, own in consumers),
            *(f"$JS.API.CONSUMER.INFO.{stream}.{own}" for stream, own in consumers),
            *(f"$JS.API.CONSUMER.RESET.{stream}.{own}" for stream, own in watches),
            *(f"$JS.ACK.{stream}.{own}.>" for stream, own in consumers),
            *(f"$JS.API.DIRECT.GET.KV_{kv}.$KV.{kv}.{name}.>" for kv in ("vm", "sec", "st")),
            f"$KV.st.{name}.>",
            f"$KV.node.{name}",
            f"virtbus.evt.{name}.>",
            f"virtbus.node.{name}.>",
        ),
        subscribe=(f"virtbus.node.{name}.>", f"_INBOX_{name}.>", "$SRV.>"),
        answers=True,
        node=name,
    )


def _listed(subjects: tuple[str, ...]) -> str:
    return "[" + ", ".join(f'"{subject}"' for subject in subjects) + "]"


def user_block(role: Role, password: str) -> str:
    """One entry of `authorization.users`."""
    head = f'    {{ user: "{role.user}", password: "{password}"'
    if not role.publish:
        return head + " }"
    deny = f", deny: {_listed(role.deny_publish)}" if role.deny_publish else ""
    answers = f'\n      allow_responses: {{ max: -1, expires: "{REPLY_EXPIRES}" }}'
    return (
        f"{head}, permissions: {{\n"
        f"      publish: {{ allow: {_listed(role.publish)}{deny} }}\n"
        f"      subscribe: {{ allow: {_listed(role.subscribe)} }}"
        f"{answers if role.answers else ''}\n    }} }}"
    )
