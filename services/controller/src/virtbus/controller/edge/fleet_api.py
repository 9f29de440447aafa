"""`image.*`, `network.*`, `bus.*` and `vm.events`: the requests about the fleet."""

import asyncio
from collections import Counter
from collections.abc import Iterable
from typing import Any

from virtbus.bus.ports import Bus, BusError, Request, StreamReport
from virtbus.controller.core.fleet import Fleet
from virtbus.controller.core.image_pages import merged
from virtbus.controller.core.node_views import node_views
from virtbus.controller.edge.storage import Storage
from virtbus.schemas import subjects
from virtbus.schemas.api import (
    BusStatus,
    ConsumerStatus,
    Empty,
    EventItem,
    EventList,
    EventPage,
    NetworkPage,
    StreamStatus,
)
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.events import Kind
from virtbus.schemas.ids import UNPLACED
from virtbus.schemas.image import ImageInfo
from virtbus.schemas.image_api import (
    DeletedImages,
    ImageDelete,
    ImageList,
    ImagePage,
    ImagePull,
    PulledImages,
)
from virtbus.schemas.network import NetworkInfo
from virtbus.schemas.nodework import ForgetImage, ForgottenImage, HeldImages, ListImages, PullImage
from virtbus.schemas.states import VmState
from virtbus.schemas.wire import decode, validate

NODE_ANSWER_S = 3.0
COMING_UP = {VmState.PENDING, VmState.SCHEDULED, VmState.PREPARING, VmState.STARTING}


class FleetApi:
    """The handlers that ask about nodes, or ask nodes."""

    def __init__(self, bus: Bus, fleet: Fleet, storage: Storage) -> None:
        self._bus = bus
        self._storage = storage
        self._fleet = fleet

    async def networks(self, request: Request) -> NetworkPage:
        validate(Empty, request.data)
        nodes: dict[str, list[str]] = {}
        for name, seen in self._fleet.nodes.items():
            for network in seen.record.networks:
                nodes.setdefault(network, []).append(name)
        kinds = {True: "built-in", False: "cni"}
        return NetworkPage(
            items=tuple(
                NetworkInfo(
                    name=name,
                    kind=kinds[name == "default"],
                    detail={"nodes": ", ".join(sorted(there))},
                )
                for name, there in sorted(nodes.items())
            )
        )

    # --- images ---------------------------------------------------------------------------
    async def images(self, request: Request) -> ImagePage:
        want = validate(ImageList, request.data)
        ask = ListImages(after=want.continue_ or "")
        answers, _ = await self._ask(self._fleet.nodes, "list", ask, NODE_ANSWER_S)
        return merged({node: validate(HeldImages, answer) for node, answer in answers.items()})

    async def pull(self, request: Request) -> PulledImages:
        want = validate(ImagePull, request.data)
        nodes = self._named(want.node)
        left_s = _left_s(request)
        ask = PullImage(ref=want.ref, job=want.job or self._bus.sources.uuid7())
        answers, errors = await self._ask(nodes, "pull", ask, left_s)
        if errors and not answers:
            raise next(iter(errors.values()))
        return PulledImages(
            images={node: validate(ImageInfo, answer) for node, answer in answers.items()},
            errors={node: error.body.message for node, error in errors.items()},
        )

    async def delete_image(self, request: Request) -> DeletedImages:
        """Remove an image; 404 only where no node had it."""
        want = validate(ImageDelete, request.data)
        nodes = self._named(want.node)
        answers, errors = await self._ask(
            nodes, "delete", ForgetImage(ref=want.ref), _left_s(request)
        )
        failed = {n: error for n, error in errors.items() if error.code != Code.NOT_FOUND}
        if errors and not answers:
            raise next(iter((failed or errors).values()))
        return DeletedImages(
            nodes={node: validate(ForgottenImage, answer) for node, answer in answers.items()},
            errors={node: error.body.message for node, error in failed.items()},
        )

    def _named(self, node: str | None) -> list[str]:
        """The node that was named, or all."""
        nodes = [node] if node else sorted(self._fleet.nodes)
        if not nodes:
            message = "no node has joined; start one with `virtbus up`"
            raise VirtbusError(Code.UNAVAILABLE, "no_node", message, after_ms=5000)
        if node and node not in self._fleet.nodes:
            message = f"there is no node {node}; `virtbus node list` shows what there is"
            raise VirtbusError(Code.NOT_FOUND, "node_not_found", message)
        return nodes

    async def _ask(
        self, nodes: Iterable[str], verb: str, value: Any, timeout_s: float
    ) -> tuple[dict[str, Any], dict[str, VirtbusError]]:
        """Ask imaged of each node at once; answers and errors by node."""
        answers: dict[str, Any] = {}
        errors: dict[str, VirtbusError] = {}

        async def ask(node: str) -> None:
            subject = subjects.rpc(node, "imaged", verb)
            try:
                answers[node] = await self._bus.request(subject, value, timeout_s=timeout_s)
            except VirtbusError as error:
                errors[node] = error
            except BusError as error:
                message = f"imaged of {node} does not answer ({error}); see `virtbus status`"
                errors[node] = VirtbusError(Code.UNAVAILABLE, "imaged_silent", message)

        async with asyncio.TaskGroup() as group:
            for node in nodes:
                group.create_task(ask(node))
        return answers, errors

    # --- facts and state ------------------------------------------------------------------
    async def events(self, request: Request) -> EventPage:
        want = validate(EventList, request.data)
        stored = await self._bus.history(
            subjects.events(want.uid), after=want.after, limit=want.limit
        )
        span = str(Kind.SPAN)
        items = []
        for message in stored:
            if message.subject.endswith(f".{span}") and not want.spans:
                continue
            body = decode(message.body)
            data = body.get("data", body) if isinstance(body, dict) else {}
            items += [
                EventItem(
                    sequence=message.sequence,
                    subject=message.subject,
                    time_ns=message.time_ns,
                    data=fact,
                )
                for fact in data.get("spans", [data])  # spans that ended together are one message
            ]
        return EventPage(items=tuple(items))

    async def status(self, request: Request) -> BusStatus:
        """What `virtbus status` shows beside the services' own answers."""
        validate(Empty, request.data)
        now_s = asyncio.get_running_loop().time()
        nodes = tuple(node_views(self._fleet, now_s))
        shown = [view for uid in self._fleet.vms if (view := self._fleet.show(uid, now_s))]
        waiting = [view.created_ns for view in shown if view.state in COMING_UP and view.powered]
        report = await self._bus.report()
        dead = sum(stream.messages for stream in report if stream.name == "DLQ")
        return BusStatus(
            streams=tuple(map(_stream, report)),
            nodes=nodes,
            vms=dict(Counter(str(view.state) for view in shown)),
            oldest_pending_created_ns=min(waiting, default=None),
            queue_depth=len(waiting),
            unplaced=sum(view.node == UNPLACED for view in shown),
            dead_letters=dead,
            skew_s=max((abs(node.skew_s) for node in nodes), default=0.0),
            servers=min((stream.replicas for stream in report), default=0),
            servers_current=min((stream.current for stream in report), default=0),
            highly_available=all(stream.replicas >= 3 for stream in report) and bool(report),
            alarms=(*self._storage.alarms(), *self._fleet.alarms(), *_dead_letters(dead)),
        )


def _stream(one: StreamReport) -> StreamStatus:
    return StreamStatus(
        name=one.name,
        fill=one.fill,
        messages=one.messages,
        replicas=one.replicas,
        consumers=tuple(
            ConsumerStatus(name=c.name, pending=c.pending, waiting=c.waiting) for c in one.consumers
        ),
    )


def _dead_letters(count: int) -> tuple[str, ...]:
    if not count:
        return ()
    message = (
        f"{count} message(s) could not be handled: nats stream view DLQ shows which and why; "
        "nats stream purge DLQ forgets them"
    )
    return (message,)


def _left_s(request: Request) -> float:
    return max(request.deadline_s - asyncio.get_running_loop().time(), 0.1)
