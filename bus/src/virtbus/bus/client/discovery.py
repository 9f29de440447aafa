"""Answers the PING, INFO and STATS verbs of ADR-32, so that `nats micro ls` works."""

import json
from datetime import UTC, datetime
from typing import Any

from virtbus.bus.client.link import Link, Raw, Subscription
from virtbus.bus.client.message_format import CONTENT_TYPE, JSON
from virtbus.bus.client.ports import ServiceInfo
from virtbus.bus.errors import BusError
from virtbus.bus.runtime.ids import uuid7
from virtbus.bus.runtime.tasks import Background


class Tally:
    """Counts the requests of one endpoint for STATS."""

    def __init__(self, name: str, subject: str, queue: str) -> None:
        self.name = name
        self.subject = subject
        self.queue = queue
        self.requests = 0
        self.errors = 0
        self.last_error = ""
        self.total_s = 0.0

    @property
    def mean_s(self) -> float:
        return self.total_s / self.requests if self.requests else 0.0

    def done(self, took_s: float, failure: str) -> None:
        """Count one answered request; `failure` is empty for success."""
        self.requests += 1
        self.total_s += took_s
        if failure:
            self.errors += 1
            self.last_error = failure


class Discovery:
    """Answers the three monitoring verbs for one service instance."""

    def __init__(
        self, link: Link, info: ServiceInfo, tallies: list[Tally], tasks: Background
    ) -> None:
        self._link = link
        self._info = info
        self._tallies = tallies
        self._tasks = tasks
        self._id = uuid7().replace("-", "")
        self._started = datetime.now(UTC).isoformat().replace("+00:00", "Z")

    async def open(self) -> list[Subscription]:
        """Subscribe to each verb in three forms: all services, this name, this instance."""
        tails = ("", f".{self._info.name}", f".{self._info.name}.{self._id}")
        return [
            await self._link.open(f"$SRV.{verb}{tail}", self._receive)
            for verb in ("PING", "INFO", "STATS")
            for tail in tails
        ]

    def _receive(self, raw: Raw) -> None:
        if raw.reply.startswith(("_INBOX", "_R_.")):
            self._tasks.start(self._answer(raw))

    async def _answer(self, raw: Raw) -> None:
        verb = raw.subject.split(".")[1]
        body = json.dumps(self._body(verb)).encode()
        try:
            await self._link.send(raw.reply, body, headers={CONTENT_TYPE: JSON})
        except BusError:
            return  # the requester repeats its request

    def _body(self, verb: str) -> dict[str, Any]:
        body: dict[str, Any] = {
            "type": f"io.nats.micro.v1.{verb.lower()}_response",
            "name": self._info.name,
            "id": self._id,
            "version": self._info.version,
            "metadata": dict(self._info.metadata),
        }
        if verb == "INFO":
            body["description"] = self._info.description
            body["endpoints"] = [self._named(tally) for tally in self._tallies]
        elif verb == "STATS":
            body["started"] = self._started
            body["endpoints"] = [self._counted(tally) for tally in self._tallies]
        return body

    @staticmethod
    def _named(tally: Tally) -> dict[str, Any]:
        return {
            "name": tally.name,
            "subject": tally.subject,
            "queue_group": tally.queue,
            "metadata": {},
        }

    @staticmethod
    def _counted(tally: Tally) -> dict[str, Any]:
        return {
            "name": tally.name,
            "subject": tally.subject,
            "queue_group": tally.queue,
            "num_requests": tally.requests,
            "num_errors": tally.errors,
            "last_error": tally.last_error,
            "processing_time": int(tally.total_s * 1e9),
            "average_processing_time": int(tally.mean_s * 1e9),
        }
