"""Rewinds the JetStream consumer of a watch. The consumer then delivers all keys again.

A watch has an ephemeral `OwnConsumer`, or uses a node's durable `NodeConsumer`.
"""

import secrets
from collections.abc import Awaitable
from contextlib import suppress
from typing import Any, Protocol

from virtbus.bus.client.jetstream_errors import CONSUMER_NOT_FOUND, ApiError
from virtbus.bus.client.records import stream_of
from virtbus.bus.errors import BusError

CALL_S = 2.0
INACTIVE_S = 30


class JetStreamCall(Protocol):
    """The signature of `Records.call`: one call of JetStream's API."""

    def __call__(
        self, subject: str, body: dict[str, Any] | None = None, *, timeout_s: float | None = None
    ) -> Awaitable[dict[str, Any]]: ...


def node_consumer(node: str, service: str) -> str:
    """Return the durable name `n-<node>-<service>`."""
    return f"n-{node}-{service}"


class OwnConsumer:
    """An ephemeral consumer in memory with one replica. `rewind` keeps the consumer's name."""

    def __init__(self, call: JetStreamCall, filters: tuple[str, ...], owner: str) -> None:
        self._call = call
        self._filters = filters
        self._stream = stream_of(filters[0])
        if any(stream_of(one) != self._stream for one in filters):
            msg = f"one watch is over one bucket, not {', '.join(filters)}"
            raise ValueError(msg)
        safe = "".join(c if c.isalnum() or c in "-_" else "-" for c in owner)
        self._name = f"w-{safe}-{secrets.token_hex(4)}"
        self._made = False

    stays = False

    @property
    def pull_subject(self) -> str:
        return f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{self._name}"

    async def rewind(self) -> int:
        if self._made:
            await self.close()  # creating an existing consumer would not begin its list again
        self._made = True
        config: dict[str, Any] = {
            "name": self._name,
            "deliver_policy": "last_per_subject",
            "ack_policy": "none",
            "mem_storage": True,
            "num_replicas": 1,
            "max_waiting": 8,
            "inactive_threshold": INACTIVE_S * 1_000_000_000,
        }
        subject = f"$JS.API.CONSUMER.CREATE.{self._stream}.{self._name}"
        if len(self._filters) == 1:
            config["filter_subject"] = self._filters[0]
            subject += f".{self._filters[0]}"
        else:
            config["filter_subjects"] = list(self._filters)
        info = await self._call(
            subject,
            {"stream_name": self._stream, "config": config, "action": "create"},
            timeout_s=CALL_S,
        )
        return int(info["num_pending"])

    async def close(self) -> None:
        with suppress(ApiError):
            await self._call(
                f"$JS.API.CONSUMER.DELETE.{self._stream}.{self._name}", timeout_s=CALL_S
            )


class NodeConsumer:
    """The durable consumer `n-<node>-<service>` of bucket `vm`.

    A controller creates this consumer when the node joins.
    """

    stays = True

    def __init__(self, call: JetStreamCall, node: str, service: str) -> None:
        self._call = call
        self._name = node_consumer(node, service)

    @property
    def pull_subject(self) -> str:
        return f"$JS.API.CONSUMER.MSG.NEXT.KV_vm.{self._name}"

    async def rewind(self) -> int:
        """Reset the consumer to sequence 1; return the number of messages in the new list.

        Messages that an open pull has received since the reset count, too.

        Raises:
            BusError: the consumer does not exist yet, or the call fails.
        """
        try:
            await self._call(
                f"$JS.API.CONSUMER.RESET.KV_vm.{self._name}", {"seq": 1}, timeout_s=CALL_S
            )
            info = await self._call(f"$JS.API.CONSUMER.INFO.KV_vm.{self._name}", timeout_s=CALL_S)
        except ApiError as error:
            if error.code == CONSUMER_NOT_FOUND:
                msg = (
                    f"consumer {self._name} does not exist yet: a controller makes it when it sees"
                    " this node"
                )
                raise BusError(msg) from error
            raise
        return int(info["num_pending"]) + int(info["delivered"]["consumer_seq"])

    async def close(self) -> None:
        """Do nothing: the durable consumer stays."""
