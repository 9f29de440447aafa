"""Fetches an image onto many nodes at once, and reports the progress of each node."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from virtbus.bus.client.ports import Bus
from virtbus.bus.client.subscriptions import hear
from virtbus.bus.errors import BusError, OutcomeUnknownError
from virtbus.bus.runtime.ids import uuid7
from virtbus.bus.runtime.tasks import background
from virtbus.schemas import subjects
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.image import ImageInfo, Progress
from virtbus.schemas.image_api import ImagePull, PulledImages
from virtbus.schemas.wire import validate

AT_ONCE = 32
"""Number of nodes that fetch at one time. A controller handles 256 such requests at one time, from
all clients together."""
ANSWER_S = 30.0
"""Time limit for one answer. A node that needs longer answers after 20 s that it is still fetching,
and the request is repeated."""
_CONTINUES = "not there in time; the node continues, repeat the command to wait for it"
WAITING, FETCHING, READY, FAILED = "waiting", "fetching", "ready", "failed"


@dataclass(slots=True)
class NodePull:
    """The pull of the image by one node."""

    node: str
    state: str = WAITING
    done_bytes: int = 0
    total_bytes: int | None = None
    took_s: float = 0.0
    image: ImageInfo | None = None
    message: str = ""
    job: str = field(default_factory=uuid7)
    """The id in the subject of the pull's progress messages."""


class Fetching:
    """The pulls of one image by many nodes. After each change, `changed` gets all pulls."""

    def __init__(
        self,
        bus: Bus,
        nodes: Sequence[str],
        ref: str,
        changed: Callable[[Sequence[NodePull]], None],
    ) -> None:
        self._bus = bus
        self._ref = ref
        self._changed = changed
        self._places = asyncio.Semaphore(AT_ONCE)
        self.pulls = [NodePull(node) for node in nodes]

    async def run(self, timeout_s: float) -> list[NodePull]:
        """Return all pulls once each is ready or has failed. Failures are in the pulls."""
        end_s = asyncio.get_running_loop().time() + timeout_s
        async with asyncio.TaskGroup() as group:
            for pull in self.pulls:
                group.create_task(self._one(pull, end_s))
        return self.pulls

    async def _one(self, pull: NodePull, end_s: float) -> None:
        clock = asyncio.get_running_loop().time
        began_s = clock()
        try:
            async with asyncio.timeout_at(end_s), self._places:
                began_s = clock()
                pull.state = FETCHING
                self._changed(self.pulls)
                pull.image = await self._with_progress(pull)
                pull.state = READY
        except TimeoutError:
            pull.message = "not begun in time" if pull.state == WAITING else _CONTINUES
            pull.state = FAILED
        except (VirtbusError, BusError) as error:
            pull.state, pull.message = FAILED, str(error)
        pull.took_s = clock() - began_s
        self._changed(self.pulls)

    async def _with_progress(self, pull: NodePull) -> ImageInfo:
        def moved(report: Progress) -> None:
            pull.done_bytes, pull.total_bytes = report.done_bytes, report.total_bytes
            self._changed(self.pulls)

        subject = subjects.progress(pull.node, pull.job, "image")
        async with self._bus.subscribe(subject) as messages, background() as tasks:
            tasks.start(hear(messages, Progress, moved))
            return await self._answer(pull)

    async def _answer(self, pull: NodePull) -> ImageInfo:
        """Request the image until the node has it. Raise errors that a retry cannot change."""
        want = ImagePull(ref=self._ref, node=pull.node, job=pull.job)
        while True:
            try:
                answer = await self._bus.request(
                    subjects.api("image", "pull"), want, timeout_s=ANSWER_S
                )
                return _image(validate(PulledImages, answer), pull.node)
            except VirtbusError as error:
                if error.body.after_ms is None:
                    raise
                await asyncio.sleep(error.body.after_ms / 1000)
            except OutcomeUnknownError:
                continue  # only the answer was lost; the node still fetches


def _image(answer: PulledImages, node: str) -> ImageInfo:
    image = answer.images.get(node)
    if image is None:
        raise BusError(answer.errors.get(node, "the answer has no image"))
    return image
