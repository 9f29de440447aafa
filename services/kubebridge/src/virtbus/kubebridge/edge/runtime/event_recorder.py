"""Recorder of Events on objects, with rate limits as in client-go's recorder.

An object may get BURST Events, and then one Event per REFILL_S seconds. An Event beyond the limit,
or one whose request fails, is dropped. A repeated Event increments the series of the first. Events
do not delay the reconcile.
"""

import asyncio
import logging
from dataclasses import dataclass

from virtbus.bus.runtime.recent import Recent
from virtbus.bus.runtime.sources import REAL, Sources
from virtbus.kubebridge.core.objects.unstructured import Object, micro_stamp, text
from virtbus.kubebridge.core.runtime.controller import EVENT, RecordEvent
from virtbus.kubebridge.edge.cluster import MANAGER, Json, KubernetesApi, StatusError

log = logging.getLogger(__name__)

BURST, REFILL_S = 25.0, 300.0
WAITING_MAX = 2000
"""Maximum number of Events in the queue. Further Events are dropped."""
SENT_MAX = 4096
"""Maximum number of sent Events that are remembered, in order to count repeats.

The rates of as many objects are remembered.
"""
COUNTED_S = 60.0
"""Shortest time in seconds between two writes of an Event's count."""
SENDERS = 2
NOTE_MAX = 1024
"""Longest note, in bytes."""


@dataclass(slots=True)
class _SentEvent:
    """A sent Event: its name, the time of its last write, and its count."""

    name: str
    written_s: float
    count: int = 1


class EventRecorder:
    """Sends Events while `run` runs."""

    def __init__(self, cluster: KubernetesApi, instance: str, sources: Sources = REAL) -> None:
        self._cluster = cluster
        self._instance = instance
        self._sources = sources
        self._waiting: asyncio.Queue[tuple[Json, RecordEvent]] = asyncio.Queue(WAITING_MAX)
        self._sent: Recent[tuple[str, str, str], _SentEvent] = Recent(SENT_MAX)
        self._tokens: Recent[str, tuple[float, float]] = Recent(SENT_MAX)
        self.dropped = 0

    def record(self, obj: Object, what: RecordEvent) -> None:
        try:
            meta = obj["metadata"]
            about = {key: text(obj, key) for key in ("apiVersion", "kind")}
            about |= {key: text(meta, key) for key in ("namespace", "name", "uid")}
            self._waiting.put_nowait((about, what))
        except asyncio.QueueFull:
            self.dropped += 1

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(SENDERS):
                group.create_task(self._send())

    async def _send(self) -> None:
        while True:
            about, what = await self._waiting.get()
            try:
                await self._record(about, what)
            except StatusError as answer:
                self.dropped += 1
                log.debug("event %s: %s", what.reason, answer)

    async def _record(self, about: Json, what: RecordEvent) -> None:
        now_s = asyncio.get_running_loop().time()
        same = (about["uid"], what.reason, what.message)
        sent = self._sent.get(same)
        if sent is not None and await self._counted(sent, about, now_s):
            self._sent[same] = sent
            return
        if not self._may(about["uid"], now_s):
            self.dropped += 1
            return
        name = f"{about['name'][:200]}.{self._sources.uuid7()[-12:]}"
        self._sent[same] = _SentEvent(name, now_s)
        try:
            await self._cluster.create(EVENT, self._event(name, about, what), about["namespace"])
        except StatusError:
            self._sent.pop(same, None)
            raise

    async def _counted(self, sent: _SentEvent, about: Json, now_s: float) -> bool:
        """Count a repeat. Return False if the Event no longer exists; Events expire."""
        sent.count += 1
        if now_s - sent.written_s < COUNTED_S:
            return True
        sent.written_s = now_s
        series = {"count": sent.count, "lastObservedTime": micro_stamp(self._sources.now())}
        try:
            await self._cluster.patch(EVENT, sent.name, {"series": series}, about["namespace"])
        except StatusError as answer:
            if answer.code != 404:
                raise
            return False
        return True

    def _may(self, uid: str, now_s: float) -> bool:
        tokens, at_s = self._tokens.get(uid, (BURST, now_s))
        tokens = min(BURST, tokens + (now_s - at_s) / REFILL_S)
        self._tokens[uid] = (max(tokens - 1, 0.0) if tokens >= 1 else tokens, now_s)
        return tokens >= 1

    def _event(self, name: str, about: Json, what: RecordEvent) -> Json:
        return {
            "apiVersion": EVENT.api_version,
            "kind": EVENT.kind,
            "metadata": {"name": name, "namespace": about["namespace"]},
            "eventTime": micro_stamp(self._sources.now()),
            "reportingController": MANAGER,
            "reportingInstance": self._instance[:128],
            "action": what.reason,
            "reason": what.reason,
            "regarding": about,
            "note": what.message.encode()[:NOTE_MAX].decode(errors="ignore"),
            "type": "Warning" if what.warning else "Normal",
        }
