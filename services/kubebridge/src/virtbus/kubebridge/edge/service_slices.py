"""Keeps the EndpointSlices of Services that select VMs (`core/endpoint_slices.py`).

Changes are gathered for a moment: a hundred guests that start together are one write of a slice.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from virtbus.kubebridge.core.actions import Tell
from virtbus.kubebridge.core.endpoint_slices import (
    SERVICE_NAME,
    CreateSlice,
    DeleteSlice,
    ReplaceSlice,
    SliceAction,
    Warn,
    reconcile,
)
from virtbus.kubebridge.core.plain import Object, part, text
from virtbus.kubebridge.core.service_members import Member, member, selects
from virtbus.kubebridge.edge.cluster import Answer, Cluster
from virtbus.kubebridge.edge.kinds import ENDPOINT_SLICE
from virtbus.kubebridge.edge.objects import Objects
from virtbus.schemas.network import InterfaceStatus

log = logging.getLogger(__name__)

GATHER_S = 0.5
RETRY_S = 5.0
"""After a write that was refused, where nothing else changes meanwhile."""

Interfaces = Callable[[str], Sequence[InterfaceStatus]]
"""What virtbus says of the VM of a uid."""
Telling = Callable[[Object, Tell], None]
"""An Event on a Service, soon."""


class Followed(NamedTuple):
    """The caches that are read; `slices` has ours only."""

    vmis: Objects
    services: Objects
    slices: Objects


def space_of(name: str) -> str:
    """The namespace of a key."""
    return name.partition("/")[0]


class ServiceSlices:
    """Follows three caches, and writes while `acts` is set."""

    def __init__(
        self,
        cluster: Cluster,
        followed: Followed,
        interfaces: Interfaces,
        tell: Telling,
        acts: asyncio.Event,
    ) -> None:
        self._cluster = cluster
        self._vmis, self._services, self._slices = vmis, services, slices = followed
        self._interfaces = interfaces
        self._tell = tell
        self._acts = acts
        self._members: dict[str, dict[str, Member]] = defaultdict(dict)
        """By namespace, then by the VMI's key."""
        self._selecting: set[str] = set()
        self._spaces: set[str] = set()
        """Of the Services that select."""
        self._of: dict[str, str] = {}
        """The Service of a slice, both by their keys; `_slices_of` is the other way round."""
        self._slices_of: dict[str, set[str]] = defaultdict(set)
        self._again_s: dict[str, float] = {}
        """When to look at a Service again (loop time)."""
        self._vmis_new, self._slices_new = set(vmis), set(slices)
        self._services_new = set(services)
        self._told: dict[str, str] = {}
        """The last warning of a Service."""
        self._news = asyncio.Event()
        for told in (vmis.listeners, vmis.of_writes):
            told.append(lambda name: self._changed(self._vmis_new, name))
        services.listeners.append(lambda name: self._changed(self._services_new, name))
        slices.listeners.append(lambda name: self._changed(self._slices_new, name))

    def _changed(self, names: set[str], name: str) -> None:
        names.add(name)
        self._news.set()

    def changed(self, vmi: str) -> None:
        """The interfaces of a VMI's VM, by the VMI's key, are others."""
        self._changed(self._vmis_new, vmi)

    async def run(self) -> None:
        """Until cancelled; the caches are whole when it begins."""
        self._news.set()
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(RETRY_S if self._again_s else None):
                    await self._news.wait()
            await asyncio.sleep(GATHER_S)
            self._news.clear()
            await self._round()

    async def _round(self) -> None:
        """All Services that something of changed, and those whose time has come again."""
        now_s = asyncio.get_running_loop().time()
        due = {name for name, at_s in self._again_s.items() if at_s <= now_s}
        for name in sorted(self._take() | due):
            self._again_s.pop(name, None)
            if self._services.uid(name) and not self._acts.is_set():
                self._again_s[name] = now_s
                continue
            try:
                await self._service(name)
            except Answer as answer:
                level = logging.INFO if answer.code in {404, 409} else logging.WARNING
                log.log(level, "slices of %s: %s", name, answer, extra={"code": "slices_failed"})
                self._again_s[name] = now_s + RETRY_S

    def _take(self) -> set[str]:
        """The Services to look at; what changed is taken in."""
        self._take_services()
        names = self._services_new | set(self._selecting_what_moved())
        for name in self._slices_new:
            before = self._of.pop(name, "")
            self._slices_of[before].discard(name)
            if not self._slices_of[before]:
                del self._slices_of[before]
            if (one := self._slices.get(name)) is not None:
                service = text(one, "metadata", "labels", SERVICE_NAME)
                self._of[name] = f"{space_of(name)}/{service}"
                self._slices_of[self._of[name]].add(name)
            names |= {before, self._of.get(name, "")}
        for changed in (self._services_new, self._vmis_new, self._slices_new):
            changed.clear()
        return names - {""}

    def _take_services(self) -> None:
        """Guests are known where a Service selects: elsewhere they would cost for nothing."""
        for name in self._services_new:
            if part(self._services.get(name), "spec", "selector"):
                self._selecting.add(name)
            else:
                self._selecting.discard(name)
        spaces = {space_of(name) for name in self._selecting}
        for space in self._members.keys() - spaces:
            del self._members[space]
        self._vmis_new |= {vmi for vmi in self._vmis if space_of(vmi) in spaces - self._spaces}
        self._spaces = spaces

    def _selecting_what_moved(self) -> Iterator[str]:
        """The Services that select, or did, a VMI that is another now."""
        moved: dict[str, list[Mapping[str, str]]] = defaultdict(list)
        for vmi in sorted(self._vmis_new):
            moved[space_of(vmi)] += self._learn(vmi)
        for name in self._selecting:
            if labels := moved.get(space_of(name)):
                service = self._services.get(name) or {}
                if any(selects(service, one) for one in labels):
                    yield name

    def _learn(self, name: str) -> list[Mapping[str, str]]:
        """The labels that a VMI had and has, where it is another to Services than before."""
        if space_of(name) not in self._spaces:
            return []
        here = self._members[space_of(name)]
        vmi = self._vmis.get(name)
        now = None
        if vmi is not None:
            now = member(vmi, self._interfaces(text(vmi, "metadata", "uid")))
        before = here.pop(name, None)
        if now is not None:
            here[name] = now
        return [one.labels for one in (before, now) if one is not None] if now != before else []

    async def _service(self, name: str) -> None:
        service = self._services.get(name)
        if service is None:  # its slices go with it: they are its own
            self._told.pop(name, None)
            return
        there = [self._slices.get(one) for one in self._slices_of.get(name, ())]
        members = self._members[space_of(name)].values()
        for action in reconcile(service, members, [one for one in there if one is not None]):
            await self._do(service, name, action)

    async def _do(self, service: Object, name: str, action: SliceAction) -> None:
        namespace = text(service, "metadata", "namespace")
        made: dict[str, Any] | None = None
        match action:
            case CreateSlice(slice_):
                made = await self._cluster.create(ENDPOINT_SLICE, slice_, namespace)
            case ReplaceSlice(slice_):
                made = await self._cluster.replace(ENDPOINT_SLICE, slice_)
            case DeleteSlice(slice_name, uid):
                await self._cluster.delete(ENDPOINT_SLICE, slice_name, namespace, uid)
            case Warn(reason, message) if self._told.get(name) != message:
                self._told[name] = message
                self._tell(service, Tell(reason, message, warning=True))
        if made is not None:
            self._slices.wrote(made)
