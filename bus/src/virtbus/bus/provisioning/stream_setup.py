"""Creates and updates the streams and consumers of the bus.

Each step is idempotent and deletes nothing, so it may run at any time. A controller's credentials
allow only some steps (`permissions.controller`). Admin credentials allow all.
"""

import asyncio
import logging
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

from virtbus.bus.client.consumers import node_consumer
from virtbus.bus.client.jetstream_errors import (
    CONSUMER_DIFFERS,
    NO_PEERS,
    STREAM_NOT_FOUND,
    ApiError,
)
from virtbus.bus.client.ports import Entry, EntryKind
from virtbus.bus.errors import (
    BusError,
    ConflictError,
    DeniedError,
    FullError,
    OutcomeUnknownError,
    UnavailableError,
)
from virtbus.schemas.bounds import STORED_BYTES
from virtbus.schemas.hosts import HostRecord
from virtbus.schemas.model import SCHEMA_VERSION
from virtbus.schemas.subjects import node_host
from virtbus.schemas.version import check_version
from virtbus.schemas.wire import encode, read

log = logging.getLogger(__name__)

WATCHING_SERVICES = ("agent", "imaged", "netd")
"""The services of a node that watch its records, each by the consumer `n-<node>-<service>`."""

RETRY_S = 1.0

_SECOND = 1_000_000_000
_MIB = 1024 * 1024


HA_REPLICAS = 3
AUTO = 0
"""Default of `replicas`: three in a cluster, one on a single server."""


_SCHEMA = "virtbus.schema"
"""Metadata key of each stream for the version of its values. virtbus 0.1 did not set this key."""
_NO_MARKERS = {"subject_delete_marker_ttl": 0}
_NOT_SYNCED = {"persist_mode": "async"}
"""Writes are acknowledged before they are on disk, despite the `sync_interval` (ADR 0019)."""
_FIXED_AT_CREATION = frozenset(_NOT_SYNCED)
"""Fields that the server does not change. An existing stream keeps its value."""


class Admin(Protocol):
    """The calls of `NatsBus` that this module needs."""

    @property
    def clustered(self) -> bool: ...

    async def js_api(self, verb: str, body: dict[str, Any] | None = None) -> dict[str, Any]: ...

    async def get(self, key: str) -> Entry | None: ...

    async def put(self, key: str, value: bytes, *, expect: int | None = None) -> int: ...


class Renewed(Admin, Protocol):
    """An Admin that reports new connections."""

    @property
    def generation(self) -> int: ...

    async def renewed(self, generation: int) -> int: ...


class Sizes(NamedTuple):
    """Size limits in bytes. A full bucket refuses writes. VM creates are refused at 80 %."""

    vm: int = 1024 * _MIB
    sec: int = 512 * _MIB
    st: int = 512 * _MIB
    node: int = 16 * _MIB
    lease: int = 1 * _MIB
    evt: int = 1024 * _MIB
    dlq: int = 64 * _MIB


def _bucket(name: str, max_bytes: int, **more: Any) -> dict[str, Any]:
    """Return a bucket's configuration: the last message of each key, CAS, TTL, atomic batches."""
    return {
        "name": f"KV_{name}",
        "subjects": [f"$KV.{name}.>"],
        "retention": "limits",
        "storage": "file",
        "max_msgs_per_subject": 1,
        "discard": "new",
        "max_bytes": max_bytes,
        "deny_delete": True,
        "allow_rollup_hdrs": True,
        "allow_direct": True,
        "allow_msg_ttl": True,
        "allow_atomic": True,
        "duplicate_window": 120 * _SECOND,
        **more,
    }


def _log(name: str, max_bytes: int, **more: Any) -> dict[str, Any]:
    return {
        "name": name,
        "subjects": [f"virtbus.{name.lower()}.>"],
        "retention": "limits",
        "storage": "file",
        "discard": "old",
        "max_bytes": max_bytes,
        "allow_direct": True,
        "duplicate_window": 600 * _SECOND,
        **more,
    }


def streams(sizes: Sizes, replicas: int) -> list[dict[str, Any]]:
    """Return the configuration of every stream."""
    declared = [
        _bucket("vm", sizes.vm),
        _bucket("sec", sizes.sec),
        # Nodes write `st` and `node`. A node could empty a bucket by a rollup header, so these two
        # buckets refuse rollups. Markers of expired TTLs need rollups, so these buckets lack them.
        # Controllers detect a silent node by their own clock.
        _bucket("st", sizes.st, allow_rollup_hdrs=False),
        _bucket("node", sizes.node, storage="memory", allow_rollup_hdrs=False) | _NO_MARKERS,
        _bucket("lease", sizes.lease, subject_delete_marker_ttl=60 * _SECOND),
        _log("EVT", sizes.evt, max_age=72 * 3600 * _SECOND)
        | (_NOT_SYNCED if replicas == 1 else {}),
        _log("DLQ", sizes.dlq, max_age=30 * 24 * 3600 * _SECOND),
    ]
    for config in declared:
        config["num_replicas"] = replicas
        config["metadata"] = {_SCHEMA: str(SCHEMA_VERSION)}
        if config["name"] in STORED_BYTES:
            config["max_msg_size"] = STORED_BYTES[config["name"]]
    return declared


async def ensure(
    admin: Admin, *, replicas: int = AUTO, sizes: Sizes | None = None, may_lack: bool = False
) -> None:
    """Create or update all streams. `may_lack` skips streams that the credentials may not change.

    Raises:
        VirtbusError: 422 `older_bus` or `newer_bus`: the bus has values of another version.
        UnavailableError: the cluster has fewer than three servers online.
        DeniedError: the credentials may not change a stream, and `may_lack` is False.
        BusError: a stream cannot be changed as needed; the message names the stream.
    """
    copies = replicas or (HA_REPLICAS if admin.clustered else 1)
    await check_schema(admin)
    for config in streams(sizes or Sizes(), copies):
        try:
            await _ensure_stream(admin, config)
        except DeniedError as error:
            if not may_lack:
                raise
            text = "%s differs from its declaration: %s; run as admin: virtbus bus declare"
            log.warning(text, config["name"], error, extra={"code": "declaration_denied"})


async def check_schema(admin: Admin) -> None:
    """Refuse a bus with values of another version. Call this before any read or write.

    Raises:
        VirtbusError: 422 `older_bus` or `newer_bus`.
    """
    try:
        info = await admin.js_api("STREAM.INFO.KV_vm")
    except ApiError as error:
        if error.code == STREAM_NOT_FOUND:
            return
        raise
    version = (info["config"].get("metadata") or {}).get(_SCHEMA, "1")
    check_version("the bus", version, reasons=("older_bus", "newer_bus"))


async def keep(bus: Renewed) -> None:
    """Call `ensure` now and after each new connection, until cancelled.

    The restart of a single server loses the memory stream KV_node. `ensure` creates it again. The
    nodes' next heartbeats fill it before a node counts as down.
    """
    while True:
        generation = bus.generation
        try:
            await ensure(bus, may_lack=True)
        except (UnavailableError, OutcomeUnknownError) as error:
            log.warning(
                "declaration failed, will be retried: %s",
                error,
                extra={"code": "declaration_waits"},
            )
            await asyncio.sleep(RETRY_S)
            continue
        await bus.renewed(generation)


async def _ensure_stream(admin: Admin, config: dict[str, Any]) -> None:
    name = config["name"]
    try:
        info = await admin.js_api(f"STREAM.INFO.{name}")
    except ApiError as error:
        if error.code != STREAM_NOT_FOUND:
            raise
        await _create(admin, name, config)
        return
    present = info["config"]
    config = config | {"metadata": (present.get("metadata") or {}) | config["metadata"]}
    config = {field: value for field, value in config.items() if field not in _FIXED_AT_CREATION}
    if all((present.get(field) or None) == (value or None) for field, value in config.items()):
        return
    try:
        await admin.js_api(f"STREAM.UPDATE.{name}", {**present, **config})
    except ApiError as error:
        msg = f"stream {name} cannot become what this version declares: {error.text}"
        raise BusError(msg) from error


async def _create(admin: Admin, name: str, config: dict[str, Any]) -> None:
    try:
        await admin.js_api(f"STREAM.CREATE.{name}", config)
    except (ApiError, FullError) as error:
        if config["num_replicas"] == 1 or getattr(error, "code", NO_PEERS) != NO_PEERS:
            raise
        msg = f"stream {name} waits for three servers of the cluster: {error}"
        raise UnavailableError(msg) from error


def node_consumers(node: str) -> list[tuple[str, dict[str, Any]]]:
    """Return (stream, configuration) of a node's three consumers."""
    return [
        (
            "KV_vm",
            {
                "durable_name": node_consumer(node, service),
                "deliver_policy": "all",
                "ack_policy": "none",
                "filter_subject": f"$KV.vm.{node}.>",
                "max_waiting": 8,
                # On disk, each delivery would cost two synced writes (ADR 0017).
                "mem_storage": True,
            },
        )
        for service in WATCHING_SERVICES
    ]


async def ensure_node(admin: Admin, node: str, nonce: bytes) -> bytes:
    """Create a node's join record and consumers; return the encoded join record.

    `nonce` is a new encoded `JoinNonce`. An existing nonce stays, because a new nonce would mean
    another bus to the node. The join record is written before the consumers. So a node with
    consumers has joined.
    """
    key = f"$KV.vm.{node}._join"
    try:
        await admin.put(key, nonce, expect=0)
    except ConflictError:
        entry = await admin.get(key)
        # A purged record means that the node was removed and joins again.
        if entry is not None and entry.kind is EntryKind.PURGE:
            await admin.put(key, nonce, expect=entry.revision)
        elif entry is not None:
            nonce = entry.value
    for stream, config in node_consumers(node):
        try:
            await _create_consumer(admin, stream, config)
        except ApiError as error:
            if error.code != CONSUMER_DIFFERS or "storage" not in error.text:
                raise
            # an older version created it on disk, and its storage cannot change
            await _create_consumer(admin, stream, config | {"mem_storage": False})
    return nonce


async def _create_consumer(admin: Admin, stream: str, config: dict[str, Any]) -> None:
    """Create a consumer; raise ApiError if it exists with another configuration."""
    await admin.js_api(
        f"CONSUMER.CREATE.{stream}.{config['durable_name']}.{config['filter_subject']}",
        {"stream_name": stream, "config": config, "action": ""},
    )


async def trust_host(admin: Admin, node: str, *, trusted: bool) -> None:
    """Set `trusted` in the node's host record. Reports of a trusted host need no approval.

    The record's other fields stay. `virtbus up` without other hosts trusts its own host.
    """
    key = node_host(node)
    entry = await admin.get(key)
    record = HostRecord(node=node)
    if entry is not None and entry.kind is EntryKind.PUT:
        record = read(HostRecord, entry.value)
    if record.trusted != trusted:
        value = encode(record.model_copy(update={"trusted": trusted}))
        with suppress(ConflictError):  # after a concurrent write, the next call tries again
            await admin.put(key, value, expect=entry.revision if entry else 0)
