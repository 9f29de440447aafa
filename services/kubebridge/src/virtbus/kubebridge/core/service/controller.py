"""Controller of Services that select guests, with its indices.

A change of a guest reconciles only the Services that select the guest now or selected it before.
"""

from collections import defaultdict
from collections.abc import Mapping

from virtbus.kubebridge.core.objects.unstructured import read
from virtbus.kubebridge.core.runtime.controller import (
    BUS_VM,
    ENDPOINT_SLICE,
    SERVICE,
    VMI,
    Action,
    Controller,
    Inputs,
    Key,
    KeyMapping,
    Lister,
    RecordEvent,
)
from virtbus.kubebridge.core.service.endpoint_slices import SERVICE_NAME, reconcile
from virtbus.kubebridge.core.service.model import KubeService, Member, Slice, member, selects
from virtbus.kubebridge.core.vmi.model import Vmi
from virtbus.kubebridge.core.vmi.status import VmLister

GATHER_S = 0.5
"""Seconds for which changes are collected. Guests that start together then cause one write."""


class Services:
    """Indices of guests by namespace, Services with a selector, and slices by Service."""

    def __init__(self, services: Lister, vmis: Lister, slices: Lister, views: VmLister) -> None:
        self._services = services
        self._vmis = vmis
        self._slices = slices
        self._views = views
        self._members: dict[str, dict[str, Member]] = {}
        """Guests by namespace, then by path. Only namespaces in `_selecting` are present."""
        self._selecting: dict[str, set[Key]] = defaultdict(set)
        """The Services that have a selector, by namespace."""
        self._of: dict[str, Key] = {}
        """The Service of each slice. `_slices_of` is the inverse."""
        self._slices_of: dict[Key, set[str]] = defaultdict(set)
        self._warned: dict[Key, str] = {}

    def controller(self) -> Controller:
        watches = (
            KeyMapping(SERVICE, self.service_changed),
            KeyMapping(ENDPOINT_SLICE, self.slice_changed),
            KeyMapping(VMI, self.guest_changed),
            KeyMapping(BUS_VM, self.guest_changed),
        )
        return Controller(SERVICE, self._reconcile, watches, workers=4, gather_s=GATHER_S)

    # --- changes --------------------------------------------------------------------------
    def service_changed(self, key: Key) -> set[Key]:
        """Update the indices of a Service; return its key.

        Guests are tracked only in namespaces with a Service that has a selector.
        """
        space = key.namespace
        if read(KubeService, self._services.get(key.path)).selector:
            self._selecting[space].add(key)
        else:
            self._selecting[space].discard(key)
        if not self._selecting[space]:
            del self._selecting[space]
            self._members.pop(space, None)
        elif space not in self._members:
            self._members[space] = {}
            for path in self._vmis:
                if path.startswith(f"{space}/"):
                    self._learn(space, path)
        return {key}

    def slice_changed(self, key: Key) -> set[Key]:
        before = self._of.pop(key.path, None)
        if before is not None:
            self._slices_of[before].discard(key.path)
            if not self._slices_of[before]:
                del self._slices_of[before]
        if (one := self._slices.get(key.path)) is not None:
            service = str(read(Slice, one).labels.get(SERVICE_NAME, ""))
            self._of[key.path] = after = Key(SERVICE, key.namespace, service)
            self._slices_of[after].add(key.path)
        return {one for one in (before, self._of.get(key.path)) if one is not None}

    def guest_changed(self, key: Key) -> set[Key]:
        if key.namespace not in self._members:
            return set()
        changed = self._learn(key.namespace, key.path)
        found = set()
        for one in self._selecting[key.namespace] if changed else ():
            service = read(KubeService, self._services.get(one.path))
            if any(selects(service, labels) for labels in changed):
                found.add(one)
        return found

    def _learn(self, space: str, path: str) -> list[Mapping[str, str]]:
        """Update a guest; return its labels before and now, or nothing if it is unchanged."""
        here, raw, now = self._members[space], self._vmis.get(path), None
        if raw is not None:
            vmi = read(Vmi, raw)
            view = self._views.get(vmi.uid)
            now = member(vmi, view.interfaces if view is not None else ())
        before = here.pop(path, None)
        if now is not None:
            here[path] = now
        return [one.labels for one in (before, now) if one is not None] if now != before else []

    # --- reconcile ------------------------------------------------------------------------
    def _reconcile(self, key: Key, inputs: Inputs) -> list[Action]:
        if inputs.obj is None:  # Kubernetes deletes the slices that the Service owned
            self._warned.pop(key, None)
            return []
        there = [self._slices.get(one) for one in self._slices_of.get(key, ())]
        members = self._members.get(key.namespace, {}).values()
        slices = [read(Slice, one) for one in there if one is not None]
        actions = reconcile(read(KubeService, inputs.obj), members, slices)
        if not any(isinstance(one, RecordEvent) for one in actions):
            self._warned.pop(key, None)
        return [one for one in actions if self._is_new(key, one)]

    def _is_new(self, key: Key, action: Action) -> bool:
        if not isinstance(action, RecordEvent):
            return True
        before, self._warned[key] = self._warned.get(key), action.message
        return before != action.message
