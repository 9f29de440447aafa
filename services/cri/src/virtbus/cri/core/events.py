"""Derives CRI's events from two states of a pod. Sandboxes have the same kinds as containers."""

from collections.abc import Iterator
from typing import NamedTuple

from virtbus.cri.core.pod import Phase, Pod

CREATED, STARTED = "CONTAINER_CREATED_EVENT", "CONTAINER_STARTED_EVENT"
STOPPED, DELETED = "CONTAINER_STOPPED_EVENT", "CONTAINER_DELETED_EVENT"

OF_PHASE: dict[Phase, tuple[str, ...]] = {
    "created": (),
    "starting": (),
    "running": (STARTED,),
    "exited": (STOPPED,),
}
"""By phase: the events of a container that enters this phase. A new container also has CREATED."""


class PodEvent(NamedTuple):
    """An event of a sandbox or container. For a sandbox, `id` and `sandbox_id` are equal."""

    id: str
    sandbox_id: str
    kind: str


def events(before: Pod | None, after: Pod | None) -> Iterator[PodEvent]:
    """Yield the events between two states of a pod; None means that the pod does not exist."""
    yield from _of_sandboxes(before, after)
    yield from _of_containers(before, after)
    yield from _deleted(before, after)


def _of_sandboxes(before: Pod | None, after: Pod | None) -> Iterator[PodEvent]:
    known = {one.id: one.ready for one in before.sandboxes} if before else {}
    for one in after.sandboxes if after else ():
        if one.id not in known:
            yield PodEvent(one.id, one.id, CREATED)
            yield PodEvent(one.id, one.id, STARTED)
        if not one.ready and known.get(one.id, True):
            yield PodEvent(one.id, one.id, STOPPED)


def _of_containers(before: Pod | None, after: Pod | None) -> Iterator[PodEvent]:
    known = {one.id: one.phase for one in before.containers} if before else {}
    for one in after.containers if after else ():
        if one.id not in known:
            yield PodEvent(one.id, one.sandbox_id, CREATED)
        if one.phase != known.get(one.id, "created"):
            for kind in OF_PHASE[one.phase]:
                yield PodEvent(one.id, one.sandbox_id, kind)


def _deleted(before: Pod | None, after: Pod | None) -> Iterator[PodEvent]:
    if before is None:
        return
    containers = {one.id for one in after.containers} if after else set()
    sandboxes = {one.id for one in after.sandboxes} if after else set()
    for container in before.containers:
        if container.id not in containers:
            yield PodEvent(container.id, container.sandbox_id, DELETED)
    for sandbox in before.sandboxes:
        if sandbox.id not in sandboxes:
            yield PodEvent(sandbox.id, sandbox.id, DELETED)
