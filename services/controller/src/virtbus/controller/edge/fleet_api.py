"""Handles the requests `image.*`, `network.offers`, `bus.status` and `vm.events`."""

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel

from virtbus.bus.client.owners import node_of
from virtbus.bus.client.ports import HISTORY_BYTES, Bus, Request, StoredMessage, StreamReport
from virtbus.bus.errors import BusError
from virtbus.controller.core import history, pages
from virtbus.controller.core.fleet import Fleet
from virtbus.controller.core.image_pages import merged
from virtbus.controller.core.node_views import node_views
from virtbus.controller.core.nodes import node_not_found
from virtbus.controller.core.runtime_nodes import check_node
from virtbus.controller.core.vm_states import visible_state
from virtbus.controller.edge.bus_storage import BusStorageGuard
from virtbus.controller.edge.image_names import ImageNameReads
from virtbus.controller.edge.pace import Pace
from virtbus.schemas import subjects
from virtbus.schemas.api import (
    BusStatus,
    ConsumerStatus,
    Empty,
    NetworkPage,
    StreamStatus,
)
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.history import EventList
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
from virtbus.schemas.node import NodeState
from virtbus.schemas.node_rpc import ForgetImage, ForgottenImage, HeldImages, ListImages, PullImage
from virtbus.schemas.paging import PageAsk
from virtbus.schemas.states import VmState
from virtbus.schemas.vm import VmRecord
from virtbus.schemas.wire import validate

Model = TypeVar("Model", bound=BaseModel)

CONSUMERS_SHOWN = 500
"""Limit of the consumers that an answer shows of a stream; those with the most pending messages
come first. Each node has three consumers."""
EVENTS_AT_ONCE = 200
"""Limit of the events in an answer. A client reads on with the answer's `next_after`."""
NODE_ANSWER_S = 3.0
COMING_UP = {VmState.PENDING, VmState.SCHEDULED, VmState.PREPARING, VmState.STARTING}


class FleetApi:
    """Handlers that report on nodes, or call nodes."""

    def __init__(self, bus: Bus, fleet: Fleet, storage: BusStorageGuard) -> None:
        self._bus = bus
        self._storage = storage
        self._fleet = fleet
        self._image_names = ImageNameReads(bus, fleet)
        self._pace = Pace()
        """Serves pages of events one at a time, so that many readers do not block the loop."""

    async def networks(self, request: Request) -> pages.Plain:
        after = pages.key_of(validate(PageAsk, request.data).continue_)
        nodes: dict[str, list[str]] = {}
        for name, seen in self._fleet.nodes.items():
            for network in seen.record.networks:
                nodes.setdefault(network, []).append(name)
        kinds = {True: "built-in", False: "cni"}
        found = (
            (
                name,
                NetworkInfo(
                    name=name,
                    kind=kinds[name == "default"],
                    detail={"nodes": ", ".join(sorted(there))},
                ),
            )
            for name, there in sorted(nodes.items())
            if name > after
        )
        return pages.answer(NetworkPage, found, request)

    # --- images ---------------------------------------------------------------------------
    async def images(self, request: Request) -> ImagePage:
        want = validate(ImageList, request.data)
        ask = ListImages(after=want.continue_ or "")
        pages_by_node, _ = await self._ask(
            self._fleet.nodes, "list", ask, NODE_ANSWER_S, HeldImages
        )
        return merged(pages_by_node)

    async def pull(self, request: Request) -> PulledImages:
        want = validate(ImagePull, request.data)
        check_node(node_of(request.account), want.node)
        nodes = self._named(want.node)
        target = await self._image_names.of_ref(want.ref, want.namespace)
        job = want.job or self._bus.sources.uuid7()
        login = want.pull_secret or ""
        ask = PullImage(ref=want.ref, job=job, target=target, pull_secret=login)
        images, errors = await self._ask(nodes, "pull", ask, _left_s(request), ImageInfo)
        late = [error for error in errors.values() if error.code == Code.DEADLINE]
        if late or (errors and not images):
            raise next(iter(late or errors.values()))
        return PulledImages(images=images, errors=_texts(errors))

    async def delete_image(self, request: Request) -> DeletedImages:
        """Remove an image from nodes; it is enough that one of the nodes had the image."""
        want = validate(ImageDelete, request.data)
        nodes = self._named(want.node)
        ask, left_s = ForgetImage(ref=want.ref), _left_s(request)
        gone, errors = await self._ask(nodes, "delete", ask, left_s, ForgottenImage)
        failed = {n: error for n, error in errors.items() if error.code != Code.NOT_FOUND}
        if errors and not gone:
            raise next(iter((failed or errors).values()))
        return DeletedImages(nodes=gone, errors=_texts(failed))

    def _named(self, node: str | None) -> list[str]:
        """Return the given node, or all nodes for None.

        Raises VirtbusError for an unknown node, or if no node has joined.
        """
        nodes = [node] if node else self._fleet.known_nodes()
        if not nodes:
            message = "no node has joined; start one with `virtbus up`"
            raise VirtbusError(Code.UNAVAILABLE, "no_node", message, after_ms=5000)
        if node and not self._fleet.has_node(node):
            raise node_not_found(node)
        return nodes

    async def _ask(
        self,
        nodes: Iterable[str],
        verb: str,
        value: Any,
        timeout_s: float,
        model: type[Model],
    ) -> tuple[dict[str, Model], dict[str, VirtbusError]]:
        """Call imaged of all nodes concurrently; return answers and errors by node.

        An answer that is not a valid `model` is an error of its node.
        """
        answers: dict[str, Model] = {}
        errors: dict[str, VirtbusError] = {}

        async def ask(node: str) -> None:
            subject = subjects.rpc(node, "imaged", verb)
            try:
                answer = await self._bus.request(subject, value, timeout_s=timeout_s)
                answers[node] = validate(model, answer)
            except VirtbusError as error:
                errors[node] = error
            except BusError as error:
                message = f"imaged of {node} does not answer ({error}); see `virtbus status`"
                errors[node] = VirtbusError(Code.UNAVAILABLE, "imaged_silent", message)

        async with asyncio.TaskGroup() as group:
            for node in nodes:
                group.create_task(ask(node))
        return answers, errors

    # --- events and state ---------------------------------------------------------------------
    async def events(self, request: Request) -> pages.Plain:
        want = validate(EventList, request.data)
        limit = min(want.limit, EVENTS_AT_ONCE)
        async with self._pace.turn(request.account):
            stored = await self._bus.history(
                subjects.events(want.uid), after=want.after, limit=limit
            )
            more = len(stored) >= limit or _may_be_cut(stored)
            return history.page(stored, want, more=more, as_json=request.wants_json)

    def _states(self, nodes: Mapping[str, NodeState]) -> list[tuple[VmRecord, VmState]]:
        """Return each VM's record and state. Full views of all VMs would block the loop."""
        found = []
        for held in self._fleet.vms.values():
            node = nodes.get(held.record.node, NodeState.READY)
            state = visible_state(held.record, self._fleet.last_status(held.record), node)
            found.append((held.record, state))
        return found

    async def status(self, request: Request) -> pages.Plain:
        """Return a BusStatus as plain data. `virtbus status` shows it above the list of nodes."""
        validate(Empty, request.data)
        now_s = asyncio.get_running_loop().time()
        nodes = list(node_views(self._fleet, now_s))
        listed = pages.page(((node.node, node) for node in nodes), as_json=request.wants_json).items
        states = self._states({node.node: node.state for node in nodes})
        waiting = [r.created_ns for r, state in states if state in COMING_UP and r.powered]
        report = await self._bus.report()
        dead = sum(stream.messages for stream in report if stream.name == "DLQ")
        status = BusStatus(
            streams=tuple(map(_stream, report)),
            unlisted_nodes=len(nodes) - len(listed),
            vms=dict(Counter(str(state) for _, state in states)),
            oldest_pending_created_ns=min(waiting, default=None),
            queue_depth=len(waiting),
            unplaced=sum(record.node == UNPLACED for record, _ in states),
            dead_letters=dead,
            skew_s=max((abs(node.skew_s) for node in nodes), default=0.0),
            servers=min((stream.replicas for stream in report), default=0),
            servers_current=min((stream.current for stream in report), default=0),
            highly_available=all(stream.replicas >= 3 for stream in report) and bool(report),
            alarms=(
                *self._storage.alarms(),
                *self._fleet.alarms(),
                *self._fleet.operations.schedules.alarms(),
                *_dead_letters(dead),
            ),
        )
        return pages.plain(status, as_json=request.wants_json) | {"nodes": listed}


def _stream(one: StreamReport) -> StreamStatus:
    latest = sorted(one.consumers, key=lambda c: -c.pending)[:CONSUMERS_SHOWN]
    return StreamStatus(
        name=one.name,
        fill=one.fill,
        messages=one.messages,
        replicas=one.replicas,
        consumers=tuple(
            ConsumerStatus(name=c.name, pending=c.pending, waiting=c.waiting) for c in latest
        ),
    )


def _may_be_cut(stored: Sequence[StoredMessage]) -> bool:
    """Return True if the bus may have truncated the list at its HISTORY_BYTES."""
    return sum(len(one.body) for one in stored) > HISTORY_BYTES // 2


def _texts(errors: Mapping[str, VirtbusError]) -> dict[str, str]:
    return {node: error.body.message for node, error in errors.items()}


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
