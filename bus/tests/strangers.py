"""A stranger with stolen credentials: tries every subject, and records who received it."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import nats.aio.client

from virtbus.bus.provisioning import server
from virtbus.bus.provisioning.permissions import filled
from virtbus.bus.provisioning.stream_setup import Sizes, node_consumers, streams
from virtbus.schemas.catalogue import CHANNELS

UID = "0192f0c1-2d3e-7abc-8def-0123456789ab"
STREAM_VERBS = (
    *("CREATE", "UPDATE", "DELETE", "PURGE", "INFO", "RESTORE", "SNAPSHOT", "MSG.GET"),
    *("MSG.DELETE", "LEADER.STEPDOWN", "PEER.REMOVE"),
)
CONSUMER_VERBS = (
    *("CREATE", "DURABLE.CREATE", "DELETE", "INFO", "MSG.NEXT", "RESET", "PAUSE", "UNPIN"),
    "LEADER.STEPDOWN",
)


def every_subject(nodes: Iterable[str] = ("n1", "n2")) -> list[str]:
    """Return one literal of each subject of the system, for each node."""
    found = ["$JS.API.INFO", "$JS.API.STREAM.LIST", "$JS.API.STREAM.NAMES", "virtbus.x"]
    found += [f"$SYS.REQ.SERVER.{verb}" for verb in ("PING", "PING.CONNZ", "x.RELOAD", "x.KICK")]
    found += [f"$SYS.REQ.ACCOUNT.{verb}" for verb in ("CTL.CONNZ", "PING.STATZ", "CTL.INFO")]
    found += ["$SYS.ACCOUNT.CTL.CONNECT", "$SYS.REQ.USER.INFO", "$SRV.PING", "$SRV.INFO.x.y"]
    found += ["_R_.aaaaaa.bbbbbb", "_INBOX.x", "_INBOX_admin.x", "_INBOX_controller.x", "$KV.x.y"]
    for config in streams(Sizes(), 1):
        name = config["name"]
        found += [f"$JS.API.STREAM.{verb}.{name}" for verb in STREAM_VERBS]
        found += [f"$JS.API.DIRECT.GET.{name}", f"$JS.API.CONSUMER.LIST.{name}"]
        found += [f"$JS.API.CONSUMER.NAMES.{name}", f"$JS.API.CONSUMER.CREATE.{name}"]
    for node in nodes:
        keys = [f"$KV.{kv}.{node}.{UID}" for kv in ("vm", "sec", "st")]
        found += [*keys, f"$KV.node.{node}", f"$KV.vm.{node}._join", f"$KV.lease.{node}"]
        found += [f"$JS.API.DIRECT.GET.KV_{key.split('.')[1]}.{key}" for key in keys]
        found += [f"$JS.API.DIRECT.GET.KV_st.$KV.st.{node}._instance", f"$KV.vm.{node}._host"]
        found += [f"$JS.API.DIRECT.GET.KV_node.$KV.node.{node}"]
        found += ["$KV.sec._signing.x", "$JS.API.DIRECT.GET.KV_sec.$KV.sec._signing.x"]
        found.append(f"_INBOX_{node}.x")
        for stream, config in node_consumers(node):
            own = f"{stream}.{config['durable_name']}"
            found += [f"$JS.API.CONSUMER.{verb}.{own}" for verb in CONSUMER_VERBS]
            found.append(f"$JS.API.CONSUMER.CREATE.{own}.{config['filter_subject']}")
            found.append(f"$JS.ACK.{own}.1.1.1.1.0")
        found += [filled(channel.subject, node).replace("*", "x") for channel in CHANNELS]
    return list(dict.fromkeys(found))


class Stranger:
    """A plain NATS client with a role's credentials, and the server's refusals."""

    def __init__(self, client: Any, inbox_prefix: str) -> None:
        self.client = client
        self.refused: list[str] = []
        self.inbox_prefix = inbox_prefix

    async def hear(self, error: Exception) -> None:
        self.refused.append(str(error))

    def _was_refused(self, verb: str, subject: str) -> bool:
        # a node's calls with one answer are renamed before the server checks permissions
        names = (subject.lower(), subject.replace("$JS.API.CONSUMER.", "_JS.").lower())
        texts = [f'permissions violation for {verb} to "{name}"' for name in names]
        return any(text in one.lower() for one in self.refused for text in texts)

    async def heard_out(self) -> None:
        """Wait until the server has sent all its reactions."""
        await asyncio.sleep(0.01)  # nats-py writes its PING after its pending data
        await self.client.flush()
        await asyncio.sleep(0.01)

    async def publish_all(self, subjects: Iterable[str], **more: Any) -> list[str]:
        """Publish on each; return those that the server accepted."""
        self.refused.clear()
        tried = list(subjects)
        for subject in tried:
            await self.client.publish(subject, b"from a stranger", **more)
        await self.heard_out()
        return [one for one in tried if not self._was_refused("publish", one)]

    async def subscribe_all(self, subjects: Iterable[str]) -> list[str]:
        """Subscribe to each; return those that the server accepted."""
        self.refused.clear()
        tried = list(subjects)
        for subject in tried:
            await self.client.subscribe(subject)
        await self.heard_out()
        return [one for one in tried if not self._was_refused("subscription", one)]


@asynccontextmanager
async def stranger(nats_server: server.Server, user: str) -> AsyncIterator[Stranger]:
    """Connect as `user`."""
    settings = nats_server.settings(user).resolved()
    one = Stranger(nats.aio.client.Client(), settings.inbox_prefix)
    await one.client.connect(
        nats_server.url,
        user=settings.user,
        password=settings.password,
        inbox_prefix=settings.inbox_prefix,
        error_cb=one.hear,
    )
    try:
        yield one
    finally:
        await one.client.close()


@asynccontextmanager
async def listening(one: Stranger, subject: str) -> AsyncIterator[list[Any]]:
    """Collect the messages on a subject."""
    heard: list[Any] = []

    async def take(msg: Any) -> None:
        heard.append(msg)

    subscription = await one.client.subscribe(subject, cb=take)
    await one.heard_out()
    yield heard
    await one.heard_out()
    await asyncio.sleep(0.2)
    await subscription.unsubscribe()


async def sequences(admin: Stranger) -> dict[str, dict[str, int]]:
    """Return every stream's last sequence and messages by subject: any write changes them."""
    found: dict[str, dict[str, int]] = {}
    for config in streams(Sizes(), 1):
        name = config["name"]
        answer = await admin.client.request(
            f"$JS.API.STREAM.INFO.{name}", b'{"subjects_filter":">"}', timeout=5
        )
        state = json.loads(answer.data)["state"]
        found[name] = {"last": state["last_seq"], **(state.get("subjects") or {})}
    return found
