"""Maintains the EndpointSlices of Services that select VMs (`core/endpoint_slices.py`).

Changes are collected for a moment, so that a hundred starting guests need one write of a slice.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from virtbus.kubebridge.core.objects.plain import Object, part, text
from virtbus.kubebridge.core.runtime.actions import Tell
from virtbus.kubebridge.core.service.endpoint_slices import (
    SERVICE_NAME,
    CreateSlice,
    DeleteSlice,
    ReplaceSlice,
    SliceAction,
    Warn,
    reconcile,
)
from virtbus.kubebridge.core.service.members import Member, member, selects
from virtbus.kubebridge.edge.cluster import Answer, Cluster
from virtbus.kubebridge.edge.kinds import ENDPOINT_SLICE
from virtbus.kubebridge.edge.objects import Objects
from virtbus.schemas.network import InterfaceStatus

log = logging.getLogger(__name__)

GATHER_S = 0.5
RETRY_S = 5.0
"""Seconds before a retry after a refused write."""

Interfaces = Callable[[str], Sequence[InterfaceStatus]]
"""Returns the interfaces of the VM with a uid, as virtbus knows them."""
Telling = Callable[[Object, Tell], None]
"""Records an Event on a Service."""


class Followed(NamedTuple):
    """The caches. `slices` has only slices of the bridge."""

    vmis: Objects
    services: Objects
    slices: Objects


def space_of(name: str) -> str:
    """Return the namespace of a key."""
    return name.partition("/")[0]


class ServiceSlices:
    """Watches three caches, and writes while `acts` is set."""

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
        """Members by namespace, then by the VMI's key."""
        self._selecting: set[str] = set()
        self._spaces: set[str] = set()
        """Namespaces of the Services that select."""
        self._of: dict[str, str] = {}
        """The Service of each slice, both by key. `_slices_of` is the inverse."""
        self._slices_of: dict[str, set[str]] = defaultdict(set)
        self._again_s: dict[str, float] = {}
        """Loop times of the next retry of each Service."""
        self._vmis_new, self._slices_new = set(vmis), set(slices)
        self._services_new = set(services)
        self._told: dict[str, str] = {}
        """The last warning on each Service."""
        self._news = asyncio.Event()
        for told in (vmis.listeners, vmis.of_writes):
            told.append(lambda name: self._changed(self._vmis_new, name))
        services.listeners.append(lambda name: self._changed(self._services_new, name))
        slices.listeners.append(lambda name: self._changed(self._slices_new, name))

    def _changed(self, names: set[str], name: str) -> None:
        names.add(name)
        self._news.set()

    def changed(self, vmi: str) -> None:
        """Note a change of the interfaces of a VM, by the key of its VMI."""
        self._changed(self._vmis_new, vmi)

    async def run(self) -> None:
        """Run until cancelled. The caches must be complete."""
        self._news.set()
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(RETRY_S if self._again_s else None):
                    await self._news.wait()
            await asyncio.sleep(GATHER_S)
            self._news.clear()
            await self._round()

    async def _round(self) -> None:
        """Reconcile all Services with changes, and those whose retry is due."""
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
        """Process the changes. Return the Services to reconcile."""
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
        """Process changed Services. Guests are tracked only in namespaces that they select in."""
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
        """Yield the Services that select a changed VMI, now or before."""
        moved: dict[str, list[Mapping[str, str]]] = defaultdict(list)
        for vmi in sorted(self._vmis_new):
            moved[space_of(vmi)] += self._learn(vmi)
        for name in self._selecting:
            if labels := moved.get(space_of(name)):
                service = self._services.get(name) or {}
                if any(selects(service, one) for one in labels):
                    yield name

    def _learn(self, name: str) -> list[Mapping[str, str]]:
        """Return the labels that a VMI had and has, if it changed for Services."""
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
        if service is None:  # Kubernetes deletes its slices with it: the Service owns them
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
