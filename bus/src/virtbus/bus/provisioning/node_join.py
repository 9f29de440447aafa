"""Creates the consumers and the join record of each node that appears on the bus.

Only a process with a node's credentials can write the node's heartbeat. So a heartbeat is a request
to join. A node with a purged join record and without a heartbeat is removed: its consumers are
deleted. The restart of a single server loses all consumers; they are created again at once. Several
processes may run this module at once, because each step is idempotent.
"""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable, Collection

from virtbus.bus.client.jetstream_errors import ApiError
from virtbus.bus.client.ports import EntryKind
from virtbus.bus.errors import BusError, OutcomeUnknownError, UnavailableError
from virtbus.bus.provisioning import stream_setup
from virtbus.schemas.subjects import join_nonce
from virtbus.schemas.vm import JoinNonce
from virtbus.schemas.wire import encode

log = logging.getLogger(__name__)

LOOK_S = 0.25
VERIFY_S = 10.0
"""Interval of the search for deleted consumers. They must exist again after 15 s (F33)."""

Nodes = Callable[[], Collection[str]]
"""A function that returns the ids of the nodes with a heartbeat or a join record."""


async def keep(admin: stream_setup.Renewed, nodes: Nodes) -> None:
    """Join each node of `nodes()` whose consumers do not exist, until cancelled."""
    loop = asyncio.get_running_loop()
    joined: set[str] = set()
    failures: dict[str, str] = {}
    verify_at_s = 0.0
    generation = -1
    while True:
        due = loop.time() >= verify_at_s or admin.generation != generation
        if due or not joined.issuperset(nodes()):
            generation = admin.generation
            try:
                joined = await _join_missing(admin, set(nodes()), failures)
            except BusError as error:
                log.debug("joining failed, will be retried: %s", error)
                await asyncio.sleep(stream_setup.RETRY_S)
                continue
            verify_at_s = loop.time() + VERIFY_S
        await asyncio.sleep(stream_setup.RETRY_S if failures else LOOK_S)


async def _join_missing(
    admin: stream_setup.Admin, nodes: set[str], failures: dict[str, str]
) -> set[str]:
    """Join the nodes that lack a consumer; return the nodes that have joined.

    Set `failures` to the reasons of the nodes that cannot join. Also delete the consumers of
    removed nodes.
    """
    there = await _consumers(admin)
    for node in {_node_of(name) for _, name in there} - nodes - {""}:
        await _forget(admin, node, there)
    before = failures.copy()
    failures.clear()
    for node in sorted(nodes):
        own = stream_setup.node_consumers(node)
        wanted = {(stream, config["durable_name"]) for stream, config in own}
        if not wanted <= there and (why := await _join(admin, node)):
            failures[node] = why
            if before.get(node) != why:
                log.warning("node %s cannot join: %s", node, why, extra={"code": "join_failed"})
    return nodes - failures.keys()


async def _join(admin: stream_setup.Admin, node: str) -> str:
    """Join a node; return the reason if the bus refuses it.

    Raises:
        UnavailableError, OutcomeUnknownError: the bus does not answer, so no node can join.
    """
    try:
        await stream_setup.ensure_node(admin, node, _nonce())
    except (UnavailableError, OutcomeUnknownError):
        raise
    except BusError as error:
        return str(error)
    log.info("node %s has joined", node, extra={"code": "node_joined"})
    return ""


def _node_of(consumer: str) -> str:
    prefix, _, rest = consumer.partition("-")
    return rest.rpartition("-")[0] if prefix == "n" else ""


async def _forget(admin: stream_setup.Admin, node: str, there: set[tuple[str, str]]) -> None:
    """Delete the consumers of a node without a heartbeat, if its join record was purged."""
    join = await admin.get(join_nonce(node))
    if join is None or join.kind is not EntryKind.PURGE:
        return
    for stream, config in stream_setup.node_consumers(node):
        name = config["durable_name"]
        if (stream, name) in there:
            with contextlib.suppress(ApiError):  # another controller may have deleted the consumer
                await admin.js_api(f"CONSUMER.DELETE.{stream}.{name}")
    log.info("node %s is forgotten", node, extra={"code": "node_forgotten"})


def _nonce() -> bytes:
    return encode(JoinNonce(nonce=secrets.token_hex(16)))


async def _consumers(admin: stream_setup.Admin) -> set[tuple[str, str]]:
    stream, seen = "KV_vm", 0
    found: set[tuple[str, str]] = set()
    while True:
        page = await admin.js_api(f"CONSUMER.NAMES.{stream}", {"offset": seen})
        names = page.get("consumers") or []
        found |= {(stream, name) for name in names}
        seen += len(names)
        if not names or seen >= int(page.get("total", 0)):
            return found
